# Options and compile flags common to every target.
set(OSCAR_CUDA "AUTO" CACHE STRING "Build the CUDA backend: AUTO (where nvcc is found), ON (required) or OFF")
set_property(CACHE OSCAR_CUDA PROPERTY STRINGS AUTO ON OFF)
set(OSCAR_CUDA_ARCHITECTURES "" CACHE STRING "CUDA architectures, e.g. \"80;89;90a;100;120\"; empty: those of this machine's GPUs, 90a where it has none")
option(OSCAR_CUDA_EMULATOR "Run the CUDA kernels on the CPU, for tests: tests/emulator in place of the CUDA runtime" OFF)
set(OSCAR_SANITIZE "" CACHE STRING "Sanitizers, e.g. address,undefined or thread")
option(OSCAR_BUILD_BENCHMARKS "Build bench/ (Google Benchmark)" ON)
option(OSCAR_JOIN_SOURCES "Compile files of modules with heavy headers several at a time: faster from scratch, slower after an edit" OFF)
option(OSCAR_BUILD_FUZZERS "Build tests/fuzz (needs clang)" OFF)

if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})

find_program(OSCAR_CCACHE ccache)
if(OSCAR_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${OSCAR_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${OSCAR_CCACHE})
endif()

add_library(oscar_flags INTERFACE)
# No floating-point contraction: the scalar references specify bits, and a fused multiply-add that
# appears with one instruction set and not with another would change them. Kernels that want FMA
# ask for it by name.
target_compile_options(oscar_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Werror -ffp-contract=off>
  # g++ 12 sees overlaps in "literal" + std::string where there are none (GCC bug 105651).
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
if(OSCAR_SANITIZE)
  target_compile_options(oscar_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${OSCAR_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer>)
  # g++ 12 sees uninitialised reads in instrumented std::variant and std::optional where there are none.
  target_compile_options(oscar_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-maybe-uninitialized -O1>)
  target_link_options(oscar_flags INTERFACE -fsanitize=${OSCAR_SANITIZE})
endif()
if(OSCAR_BUILD_FUZZERS)
  target_compile_options(oscar_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
endif()

find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(tl-expected REQUIRED)
find_package(CLI11 REQUIRED)
find_package(Eigen3 REQUIRED NO_MODULE)
pkg_check_modules(LIBZIP REQUIRED IMPORTED_TARGET libzip)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(UTF8PROC REQUIRED IMPORTED_TARGET libutf8proc)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
pkg_check_modules(HWY REQUIRED IMPORTED_TARGET libhwy)
if(BUILD_TESTING)
  find_package(GTest REQUIRED)
endif()
if(OSCAR_BUILD_BENCHMARKS)
  find_package(benchmark REQUIRED)
endif()
