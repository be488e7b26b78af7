# Chooses the files behind optional parts: which gloo headers, NCCL or its absence, contexts of distributed autograd or their absence,
# TensorPipe or its absence, the device sleep of the test kit.

find_path(LOCKSTEP_GLOO_SYSTEM_INCLUDE gloo/rendezvous/store.h)
if(LOCKSTEP_GLOO_HEADERS STREQUAL "system" AND NOT LOCKSTEP_GLOO_SYSTEM_INCLUDE)
  message(FATAL_ERROR "LOCKSTEP_GLOO_HEADERS=system, but no gloo headers were found. Install libgloo-dev or use shim.")
endif()
set(LOCKSTEP_GLOO_SHIM_INCLUDE "${CMAKE_CURRENT_SOURCE_DIR}/cmake/gloo_shim")
if(LOCKSTEP_GLOO_SYSTEM_INCLUDE AND NOT LOCKSTEP_GLOO_HEADERS STREQUAL "shim")
  set(LOCKSTEP_GLOO_INCLUDE "${LOCKSTEP_GLOO_SYSTEM_INCLUDE}")
else()
  set(LOCKSTEP_GLOO_INCLUDE "${LOCKSTEP_GLOO_SHIM_INCLUDE}")
endif()

set(LOCKSTEP_HAS_CUDA_HEADERS FALSE)
set(LOCKSTEP_HAS_NCCL FALSE)
if(LOCKSTEP_TORCH_HAS_CUDA AND NOT LOCKSTEP_NCCL STREQUAL "off")
  # The toolkit's own headers, or those of the wheels that torch pulls in beside itself.
  file(GLOB _lockstep_wheel_includes "${LOCKSTEP_TORCH_ROOT}/../nvidia/*/include")
  find_package(CUDAToolkit QUIET)
  find_path(LOCKSTEP_CUDA_INCLUDE cuda_runtime_api.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ${_lockstep_wheel_includes})
  find_path(LOCKSTEP_NCCL_INCLUDE nccl.h HINTS ${_lockstep_wheel_includes} ${CUDAToolkit_INCLUDE_DIRS})
  if(LOCKSTEP_CUDA_INCLUDE)
    set(LOCKSTEP_HAS_CUDA_HEADERS TRUE)
  endif()
  if(LOCKSTEP_CUDA_INCLUDE AND LOCKSTEP_NCCL_INCLUDE)
    set(LOCKSTEP_HAS_NCCL TRUE)
  endif()
endif()
if(LOCKSTEP_NCCL STREQUAL "on" AND NOT LOCKSTEP_HAS_NCCL)
  message(FATAL_ERROR "LOCKSTEP_NCCL=on needs a CUDA libtorch and the headers nccl.h and cuda_runtime_api.h.")
endif()

# The headers are there in any case. Declared here, so that the check compiles at once.
include(CheckCXXSourceCompiles)
set(CMAKE_REQUIRED_LIBRARIES lockstep::torch)
check_cxx_source_compiles("
  #include <cstdint>
  namespace torch::distributed::autograd { struct DistAutogradContainer { static int64_t currentContextId(); }; }
  int main() { return torch::distributed::autograd::DistAutogradContainer::currentContextId() < 0 ? 0 : 1; }"
  LOCKSTEP_TORCH_HAS_RPC)
unset(CMAKE_REQUIRED_LIBRARIES)
set(LOCKSTEP_HAS_TENSORPIPE FALSE)
find_file(LOCKSTEP_TENSORPIPE_HEADER torch/csrc/distributed/rpc/tensorpipe_agent.h
  HINTS "${LOCKSTEP_TORCH_ROOT}/include" NO_DEFAULT_PATH)
if(LOCKSTEP_TORCH_HAS_RPC AND LOCKSTEP_TENSORPIPE_HEADER AND NOT LOCKSTEP_TENSORPIPE STREQUAL "off")
  set(LOCKSTEP_HAS_TENSORPIPE TRUE)
endif()
message(STATUS "Lockstep: torch ${LOCKSTEP_TORCH_VERSION} (CUDA: ${LOCKSTEP_TORCH_HAS_CUDA}, RPC: ${LOCKSTEP_TORCH_HAS_RPC}), "
  "gloo headers ${LOCKSTEP_GLOO_INCLUDE}, NCCL: ${LOCKSTEP_HAS_NCCL}, TensorPipe: ${LOCKSTEP_HAS_TENSORPIPE}")

function(lockstep_add_backends target)
  set(dir "${CMAKE_CURRENT_SOURCE_DIR}/lockstep")
  # Other flags than the rest of the library, so no shared precompiled header.
  set_source_files_properties("${dir}/comm/gloo/gloo_backend.cpp" PROPERTIES
    COMPILE_DEFINITIONS USE_C10D_GLOO
    INCLUDE_DIRECTORIES "${LOCKSTEP_GLOO_INCLUDE}"
    SKIP_PRECOMPILE_HEADERS ON)
  set(cuda_includes "${LOCKSTEP_CUDA_INCLUDE};${LOCKSTEP_NCCL_INCLUDE}")
  if(LOCKSTEP_HAS_NCCL)
    target_sources(${target} PRIVATE "${dir}/comm/nccl/optional/nccl_backend.cpp")
    set_source_files_properties("${dir}/comm/nccl/optional/nccl_backend.cpp" PROPERTIES
      COMPILE_DEFINITIONS USE_C10D_NCCL
      INCLUDE_DIRECTORIES "${cuda_includes}"
      SKIP_PRECOMPILE_HEADERS ON)
  else()
    target_sources(${target} PRIVATE "${dir}/comm/nccl/optional/no_nccl_backend.cpp")
  endif()
  set(tensorpipe "${dir}/rpc/optional/no_tensorpipe.cpp")
  if(LOCKSTEP_HAS_TENSORPIPE)
    set(tensorpipe "${dir}/rpc/optional/tensorpipe.cpp")
    set_source_files_properties("${tensorpipe}" PROPERTIES COMPILE_DEFINITIONS USE_TENSORPIPE SKIP_PRECOMPILE_HEADERS ON)
  endif()
  target_sources(${target} PRIVATE "${tensorpipe}")
  if(LOCKSTEP_TORCH_HAS_RPC)
    target_sources(${target} PRIVATE "${dir}/nn/optional/context_gradients.cpp")
  else()
    target_sources(${target} PRIVATE "${dir}/nn/optional/no_context_gradients.cpp")
  endif()
  if(LOCKSTEP_HAS_CUDA_HEADERS)
    target_sources(${target} PRIVATE "${dir}/testing/optional/cuda_sleep.cpp")
    set_source_files_properties("${dir}/testing/optional/cuda_sleep.cpp" PROPERTIES
      INCLUDE_DIRECTORIES "${cuda_includes}"
      SKIP_PRECOMPILE_HEADERS ON)
  else()
    target_sources(${target} PRIVATE "${dir}/testing/optional/no_cuda_sleep.cpp")
  endif()
endfunction()
