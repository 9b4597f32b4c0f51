# xgrammar (Apache-2.0), which compiles grammars to masks over the vocabulary, is the one dependency
# that Debian has no package of. scripts/setup.sh puts its pinned source into the user's cache; here
# the library itself, without bindings and tests, becomes one target of this build, with this build's
# compiler and sanitizer. Sets OSCAR_HAVE_XGRAMMAR.
set(OSCAR_XGRAMMAR "AUTO" CACHE STRING "Structured output with xgrammar: AUTO (where its source is found), ON (required) or OFF")
set_property(CACHE OSCAR_XGRAMMAR PROPERTY STRINGS AUTO ON OFF)
set(OSCAR_XGRAMMAR_VERSION 0.2.8)
if(DEFINED ENV{OSCAR_XGRAMMAR_SOURCE})
  set(source $ENV{OSCAR_XGRAMMAR_SOURCE})
elseif(DEFINED ENV{XDG_CACHE_HOME})
  set(source $ENV{XDG_CACHE_HOME}/oscar/xgrammar-${OSCAR_XGRAMMAR_VERSION})
else()
  set(source $ENV{HOME}/.cache/oscar/xgrammar-${OSCAR_XGRAMMAR_VERSION})
endif()
set(OSCAR_XGRAMMAR_SOURCE ${source} CACHE PATH "Source of xgrammar ${OSCAR_XGRAMMAR_VERSION}; scripts/setup.sh fetches it")

set(OSCAR_HAVE_XGRAMMAR FALSE)
if(OSCAR_XGRAMMAR STREQUAL "OFF")
  message(STATUS "xgrammar: left out (OSCAR_XGRAMMAR=OFF); no structured output")
elseif(EXISTS ${OSCAR_XGRAMMAR_SOURCE}/include/xgrammar/xgrammar.h)
  set(OSCAR_HAVE_XGRAMMAR TRUE)
  message(STATUS "xgrammar ${OSCAR_XGRAMMAR_VERSION}: on, from ${OSCAR_XGRAMMAR_SOURCE}")
elseif(OSCAR_XGRAMMAR STREQUAL "ON")
  message(FATAL_ERROR "OSCAR_XGRAMMAR=ON, but ${OSCAR_XGRAMMAR_SOURCE} does not hold xgrammar ${OSCAR_XGRAMMAR_VERSION}; "
    "run scripts/setup.sh, which fetches it, or set OSCAR_XGRAMMAR_SOURCE")
else()
  message(STATUS "xgrammar: left out (scripts/setup.sh fetches its source); no structured output")
endif()

if(OSCAR_HAVE_XGRAMMAR)
  file(GLOB xgrammar_sources CONFIGURE_DEPENDS ${OSCAR_XGRAMMAR_SOURCE}/cpp/*.cc
    ${OSCAR_XGRAMMAR_SOURCE}/cpp/support/*.cc ${OSCAR_XGRAMMAR_SOURCE}/cpp/converter_ext/*.cc)
  add_library(xgrammar STATIC EXCLUDE_FROM_ALL ${xgrammar_sources})
  target_include_directories(xgrammar SYSTEM PUBLIC ${OSCAR_XGRAMMAR_SOURCE}/include
    ${OSCAR_XGRAMMAR_SOURCE}/3rdparty/dlpack/include ${OSCAR_XGRAMMAR_SOURCE}/3rdparty/picojson)
  target_compile_definitions(xgrammar PRIVATE XGRAMMAR_ENABLE_CPPTRACE=0 XGRAMMAR_ENABLE_INTERNAL_CHECK=0
    XGRAMMAR_LOG_CUSTOMIZE=1)
  # Its warnings are not ours to mend, and -O3 costs a third more compile time for nothing measurable.
  target_compile_options(xgrammar PRIVATE -w $<$<CONFIG:Release>:-O2>)
  set_target_properties(xgrammar PROPERTIES CXX_STANDARD 17 EXPORT_COMPILE_COMMANDS OFF)
  if(OSCAR_SANITIZE MATCHES "address")
    target_compile_options(xgrammar PRIVATE -fsanitize=address -fno-omit-frame-pointer)
  elseif(OSCAR_SANITIZE MATCHES "thread")
    target_compile_options(xgrammar PRIVATE -fsanitize=thread -fno-omit-frame-pointer)
  endif()
endif()
