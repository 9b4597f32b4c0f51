# One folder = one library target, and the link graph is the include graph: a module's headers are
# visible under <module>/header.h only to targets that link to it, because each module has an
# include root of its own (a directory holding one symbolic link to the folder).

# oscar_library(NAME SRCS ... [DEPS other modules...] [PRIVATE_DEPS third-party targets...] [JOINABLE])
# JOINABLE: with OSCAR_JOIN_SOURCES files are compiled several at a time; their anonymous namespaces then share names.
function(oscar_library name)
  cmake_parse_arguments(ARG "JOINABLE" "" "SRCS;DEPS;PUBLIC_DEPS;PRIVATE_DEPS" ${ARGN})
  set(root ${CMAKE_BINARY_DIR}/modules/${name})
  file(MAKE_DIRECTORY ${root})
  if(NOT EXISTS ${root}/${name})
    file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR} ${root}/${name} SYMBOLIC)
  endif()
  set(target oscar_${name})
  list(TRANSFORM ARG_DEPS PREPEND oscar_)
  if(ARG_SRCS)
    add_library(${target} STATIC ${ARG_SRCS})
    if(ARG_JOINABLE AND OSCAR_JOIN_SOURCES)
      set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
    endif()
    target_include_directories(${target} PUBLIC ${root} ${CMAKE_SOURCE_DIR}/include)
    target_link_libraries(${target} PUBLIC ${ARG_DEPS} ${ARG_PUBLIC_DEPS} PRIVATE oscar_flags ${ARG_PRIVATE_DEPS})
  else()
    add_library(${target} INTERFACE)
    target_include_directories(${target} INTERFACE ${root} ${CMAKE_SOURCE_DIR}/include)
    target_link_libraries(${target} INTERFACE ${ARG_DEPS} ${ARG_PUBLIC_DEPS})
  endif()
endfunction()

# Sanitized programs run up to ten times slower, and their time limits grow with them.
set(OSCAR_TEST_SLOWDOWN 1)
if(OSCAR_SANITIZE)
  set(OSCAR_TEST_SLOWDOWN 10)
endif()

# Tests are compiled far more often than they are waited for, and what they call in the libraries keeps its full
# optimisation. Those that compute references themselves (COMPUTES) are worth a little more.
set(OSCAR_TEST_CODE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O0>)
set(OSCAR_COMPUTING_TEST_CODE $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)

# oscar_test(NAME SRCS ... DEPS modules... [PRIVATE_DEPS ...] [LABEL fast|slow|soak|gpu] [ARGS ...] [COMPUTES])
# One GoogleTest binary, one ctest entry. Test data lives under tests/data (OSCAR_TEST_DATA).
function(oscar_test name)
  if(NOT BUILD_TESTING)
    return()
  endif()
  cmake_parse_arguments(ARG "COMPUTES" "LABEL" "SRCS;DEPS;PRIVATE_DEPS;ARGS" ${ARGN})
  if(NOT ARG_LABEL)
    set(ARG_LABEL fast)
  endif()
  list(TRANSFORM ARG_DEPS PREPEND oscar_)
  add_executable(${name} ${ARG_SRCS})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} ${ARG_PRIVATE_DEPS} oscar_flags GTest::gmock GTest::gtest_main)
  target_compile_options(${name} PRIVATE $<IF:$<BOOL:${ARG_COMPUTES}>,${OSCAR_COMPUTING_TEST_CODE},${OSCAR_TEST_CODE}>)
  target_compile_definitions(${name} PRIVATE OSCAR_TEST_DATA="${CMAKE_SOURCE_DIR}/tests/data"
    OSCAR_DEMO_MODEL="${CMAKE_SOURCE_DIR}/models/demo")
  add_test(NAME ${name} COMMAND ${name} ${ARG_ARGS})
  math(EXPR timeout "300 * ${OSCAR_TEST_SLOWDOWN}")
  set_tests_properties(${name} PROPERTIES LABELS ${ARG_LABEL} TIMEOUT ${timeout})
endfunction()

# oscar_benchmark(NAME SRCS ... DEPS modules...): a Google Benchmark program under build/<preset>/bench.
function(oscar_benchmark name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  list(TRANSFORM ARG_DEPS PREPEND oscar_)
  add_executable(${name} ${ARG_SRCS})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bench)
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} ${ARG_PRIVATE_DEPS} oscar_flags benchmark::benchmark)
endfunction()
