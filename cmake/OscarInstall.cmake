# What `cmake --install` and `cpack` put where. The shared library holds everything behind
# include/oscar; the program does not need it.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Sources that implement public headers; of the modules behind them, what is needed.
add_library(liboscar SHARED src/runtime/engine.cc src/runtime/language_model.cc src/base/options.cc
  src/base/status.cc)
set_target_properties(liboscar PROPERTIES OUTPUT_NAME oscar VERSION ${PROJECT_VERSION}
  SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR} EXPORT_NAME oscar)
target_link_libraries(liboscar PRIVATE oscar_flags oscar_runtime)
target_link_options(liboscar PRIVATE
  "LINKER:--version-script=${CMAKE_SOURCE_DIR}/cmake/liboscar.map" LINKER:--no-undefined)
set_target_properties(liboscar PROPERTIES LINK_DEPENDS ${CMAKE_SOURCE_DIR}/cmake/liboscar.map)
target_include_directories(liboscar INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(liboscar INTERFACE cxx_std_20)

# The man page and completions are what the program says of itself.
set(generated ${CMAKE_BINARY_DIR}/generated)
file(MAKE_DIRECTORY ${generated})
add_custom_command(
  OUTPUT ${generated}/oscar.1.gz ${generated}/oscar.bash ${generated}/_oscar ${generated}/oscar.fish
  COMMAND oscar man > ${generated}/oscar.1
  COMMAND gzip -9nf ${generated}/oscar.1
  COMMAND oscar completions bash > ${generated}/oscar.bash
  COMMAND oscar completions zsh > ${generated}/_oscar
  COMMAND oscar completions fish > ${generated}/oscar.fish
  DEPENDS oscar VERBATIM)
add_custom_target(manual ALL DEPENDS ${generated}/oscar.1.gz)

install(TARGETS oscar RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS liboscar EXPORT oscarTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/oscar DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT oscarTargets NAMESPACE oscar:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)
configure_package_config_file(${CMAKE_SOURCE_DIR}/packaging/oscarConfig.cmake.in
  ${generated}/oscarConfig.cmake INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)
write_basic_package_version_file(${generated}/oscarConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${generated}/oscarConfig.cmake ${generated}/oscarConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/oscar)
# The package may be unpacked anywhere: the .pc file finds its prefix from where it lies.
file(RELATIVE_PATH pc_to_prefix /p/${CMAKE_INSTALL_LIBDIR}/pkgconfig /p)
configure_file(${CMAKE_SOURCE_DIR}/packaging/oscar.pc.in ${generated}/oscar.pc @ONLY)
install(FILES ${generated}/oscar.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES ${generated}/oscar.1.gz DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${generated}/oscar.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME oscar)
install(FILES ${generated}/_oscar DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions)
install(FILES ${generated}/oscar.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/models/demo DESTINATION ${CMAKE_INSTALL_DATADIR}/oscar/models)
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME copyright)
if(OSCAR_HAVE_XGRAMMAR)
  # It is part of the program: its notice, and the terms of picojson (BSD-2-Clause) within it. DLPack's are Apache-2.0, too.
  file(READ ${OSCAR_XGRAMMAR_SOURCE}/3rdparty/picojson/picojson.h picojson_terms LIMIT 4000)
  string(FIND "${picojson_terms}" "*/" end)
  string(SUBSTRING "${picojson_terms}" 0 ${end} picojson_terms)
  string(REGEX REPLACE "(^/\\*|\n \\*)" "\n" picojson_terms "${picojson_terms}")
  file(READ ${OSCAR_XGRAMMAR_SOURCE}/NOTICE xgrammar_notice)
  file(WRITE ${generated}/NOTICE.xgrammar
    "xgrammar ${OSCAR_XGRAMMAR_VERSION}, Apache-2.0\n\n${xgrammar_notice}\npicojson, in xgrammar\n${picojson_terms}\n")
  install(FILES ${generated}/NOTICE.xgrammar DESTINATION ${CMAKE_INSTALL_DOCDIR})
endif()
install(FILES ${CMAKE_SOURCE_DIR}/README.md ${CMAKE_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
set(AT "@")
configure_file(${CMAKE_SOURCE_DIR}/packaging/oscar.service.in ${generated}/oscar.service @ONLY)
install(FILES ${generated}/oscar.service DESTINATION lib/systemd/system)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME oscar)
set(CPACK_PACKAGE_VENDOR "The oscar authors")
set(CPACK_PACKAGE_CONTACT "The oscar authors <oscar@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Large language models on a 2-bit KV cache")
set(CPACK_PACKAGE_DESCRIPTION "oscar serves Qwen3 and Llama-3 checkpoints over the OpenAI API, with\n\
the history of every conversation kept in two bits a number at near-BF16\n\
quality. The package holds the program, its library with headers, a small\n\
demo model, and a system service that is not started by itself.")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "libexpected-dev, ca-certificates")
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${CMAKE_SOURCE_DIR}/packaging/postinst
  ${CMAKE_SOURCE_DIR}/packaging/prerm ${CMAKE_SOURCE_DIR}/packaging/postrm
  ${CMAKE_SOURCE_DIR}/packaging/conffiles)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION TRUE)
# /etc lies outside the prefix, and only a package may write there.
install(FILES ${CMAKE_SOURCE_DIR}/packaging/default DESTINATION /etc/default RENAME oscar
  COMPONENT system EXCLUDE_FROM_ALL)
set(CPACK_INSTALL_CMAKE_PROJECTS "${CMAKE_BINARY_DIR};oscar;ALL;/"
  "${CMAKE_BINARY_DIR};oscar;system;/")
include(CPack)
