# Run by ctest: installs the build in BINARY_DIR and builds and runs the consumer against it, alone and on two ranks.
set(prefix "${BINARY_DIR}/install-check/prefix")
set(build "${BINARY_DIR}/install-check/build")
file(REMOVE_RECURSE "${BINARY_DIR}/install-check")

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
  message(STATUS "${text}")
  if(NOT code EQUAL 0)
    message(FATAL_ERROR "failed (${code}): ${ARGN}")
  endif()
endfunction()

# Without an install there is nothing to be found, rather than half of a package.
execute_process(COMMAND "${CMAKE_COMMAND}" -S "${CONSUMER_DIR}" -B "${build}" -G "${GENERATOR}"
  "-DCMAKE_PREFIX_PATH=${BINARY_DIR}" "-DCMAKE_CXX_COMPILER=${CXX}" RESULT_VARIABLE code OUTPUT_VARIABLE text ERROR_VARIABLE text)
if(code EQUAL 0 OR NOT text MATCHES "Could not find a package configuration file")
  message(FATAL_ERROR "the build folder shows a package: ${text}")
endif()
file(REMOVE_RECURSE "${build}")

run("${CMAKE_COMMAND}" --install "${BINARY_DIR}" --prefix "${prefix}")
run("${CMAKE_COMMAND}" -S "${CONSUMER_DIR}" -B "${build}" -G "${GENERATOR}" "-DCMAKE_PREFIX_PATH=${prefix}"
  "-DCMAKE_CXX_COMPILER=${CXX}" "-DSANITIZE=${SANITIZE}")
run("${CMAKE_COMMAND}" --build "${build}")
run("${build}/consumer")
run("${prefix}/bin/lockstep-run" -n 2 "${build}/consumer")
run("${prefix}/bin/lockstep-checkpoint" --version)
file(REMOVE_RECURSE "${BINARY_DIR}/install-check")
