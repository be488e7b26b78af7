# Finds libtorch and describes it as the imported target lockstep::torch.
#
# Torch's own package is used only to locate the files: for a CUDA build it would also enable the CUDA language and demand a
# toolkit, which Lockstep does not need. Looked for in this order: Torch_DIR / CMAKE_PREFIX_PATH (as find_package(Torch) would),
# then the torch package of the Python interpreter named by LOCKSTEP_PYTHON (default: python3 on the PATH).
# Sets LOCKSTEP_TORCH_ROOT, LOCKSTEP_TORCH_VERSION and LOCKSTEP_TORCH_HAS_CUDA.

if(TARGET lockstep::torch)
  return()
endif()

set(LOCKSTEP_MINIMUM_TORCH 2.11)

find_path(LOCKSTEP_TORCH_CMAKE_DIR TorchConfig.cmake
  HINTS "${Torch_DIR}" ENV Torch_DIR
  PATH_SUFFIXES share/cmake/Torch
  NO_CMAKE_SYSTEM_PATH NO_SYSTEM_ENVIRONMENT_PATH)
if(NOT LOCKSTEP_TORCH_CMAKE_DIR)
  find_program(LOCKSTEP_PYTHON NAMES python3)
  if(LOCKSTEP_PYTHON)
    execute_process(
      COMMAND "${LOCKSTEP_PYTHON}" -c
        "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
      OUTPUT_VARIABLE _lockstep_torch_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_path(LOCKSTEP_TORCH_CMAKE_DIR TorchConfig.cmake
      PATHS "${_lockstep_torch_package}/share/cmake/Torch" NO_DEFAULT_PATH)
  endif()
endif()
if(NOT LOCKSTEP_TORCH_CMAKE_DIR)
  message(FATAL_ERROR "Lockstep needs libtorch ${LOCKSTEP_MINIMUM_TORCH} or later and found none. Run `make setup`, or pass "
    "-DCMAKE_PREFIX_PATH=<torch> or -DLOCKSTEP_PYTHON=<python that has torch>.")
endif()

get_filename_component(LOCKSTEP_TORCH_ROOT "${LOCKSTEP_TORCH_CMAKE_DIR}/../../.." ABSOLUTE)
file(STRINGS "${LOCKSTEP_TORCH_ROOT}/include/torch/headeronly/version.h" _lockstep_version_lines
  REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
string(REGEX REPLACE ".*MAJOR ([0-9]+).*MINOR ([0-9]+).*PATCH ([0-9]+).*" "\\1.\\2.\\3"
  LOCKSTEP_TORCH_VERSION "${_lockstep_version_lines}")
if(LOCKSTEP_TORCH_VERSION VERSION_LESS LOCKSTEP_MINIMUM_TORCH)
  message(FATAL_ERROR "Lockstep needs libtorch ${LOCKSTEP_MINIMUM_TORCH} or later; ${LOCKSTEP_TORCH_ROOT} is ${LOCKSTEP_TORCH_VERSION}.")
endif()

set(_lockstep_torch_libs torch torch_cpu c10)
if(EXISTS "${LOCKSTEP_TORCH_ROOT}/lib/libtorch_cuda.so")
  set(LOCKSTEP_TORCH_HAS_CUDA TRUE)
  list(APPEND _lockstep_torch_libs torch_cuda c10_cuda)
else()
  set(LOCKSTEP_TORCH_HAS_CUDA FALSE)
endif()

add_library(lockstep::torch INTERFACE IMPORTED)
set_target_properties(lockstep::torch PROPERTIES
  INTERFACE_INCLUDE_DIRECTORIES
    "${LOCKSTEP_TORCH_ROOT}/include;${LOCKSTEP_TORCH_ROOT}/include/torch/csrc/api/include"
  INTERFACE_SYSTEM_INCLUDE_DIRECTORIES
    "${LOCKSTEP_TORCH_ROOT}/include;${LOCKSTEP_TORCH_ROOT}/include/torch/csrc/api/include"
  INTERFACE_COMPILE_FEATURES cxx_std_20)
foreach(_lib IN LISTS _lockstep_torch_libs)
  # libtorch registers its CUDA kernels when loaded, so the linker must not drop a library no symbol of which is used.
  target_link_libraries(lockstep::torch INTERFACE
    "-Wl,--push-state,--no-as-needed ${LOCKSTEP_TORCH_ROOT}/lib/lib${_lib}.so -Wl,--pop-state")
endforeach()
target_link_options(lockstep::torch INTERFACE "-Wl,-rpath,${LOCKSTEP_TORCH_ROOT}/lib")
# libtorch_cuda finds its own dependencies through its rpath; the linker does not.
target_link_options(lockstep::torch INTERFACE "-Wl,--allow-shlib-undefined")
