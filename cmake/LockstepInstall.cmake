# Install tree with find_package(lockstep), the single target lockstep::lockstep and the programs.

include(CMakePackageConfigHelpers)

set(LOCKSTEP_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/lockstep")
install(TARGETS lockstep EXPORT lockstepTargets FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS lockstep-run lockstep-checkpoint RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION "${LOCKSTEP_CMAKE_DIR}")
# Where find_package() does not look: it is of use only beside the installed targets.
set(LOCKSTEP_PACKAGE_DIR "${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/package")
file(REMOVE "${CMAKE_CURRENT_BINARY_DIR}/lockstepConfig.cmake" "${CMAKE_CURRENT_BINARY_DIR}/lockstepConfigVersion.cmake")
configure_package_config_file(cmake/lockstepConfig.cmake.in "${LOCKSTEP_PACKAGE_DIR}/lockstepConfig.cmake"
  INSTALL_DESTINATION "${LOCKSTEP_CMAKE_DIR}")
write_basic_package_version_file("${LOCKSTEP_PACKAGE_DIR}/lockstepConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES
  "${LOCKSTEP_PACKAGE_DIR}/lockstepConfig.cmake"
  "${LOCKSTEP_PACKAGE_DIR}/lockstepConfigVersion.cmake"
  cmake/LockstepTorch.cmake
  DESTINATION "${LOCKSTEP_CMAKE_DIR}")
