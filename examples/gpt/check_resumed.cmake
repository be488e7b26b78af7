# A demo that is killed goes on from its last checkpoint: with the losses of one that was not, bit by bit on as many ranks and nearly so on
# others, however they divide the model.
include("${CMAKE_CURRENT_LIST_DIR}/../common/losses.cmake")

set(checkpoint --checkpoint-every 5)
file(REMOVE_RECURSE "${OUTPUT}/run" "${OUTPUT}/copy")
train(whole 2 --parallel fsdp)
execute_process(COMMAND "${RUN}" -n 2 --timeout 110s --no-prefix "${PROGRAM}" --device cpu --steps 12 --progress none --parallel fsdp
    --checkpoint "${OUTPUT}/run" ${checkpoint} --die-at 8
  RESULT_VARIABLE result OUTPUT_QUIET ERROR_QUIET)
if(result EQUAL 0 OR NOT EXISTS "${OUTPUT}/run/step-00000005/lockstep.json")
  message(FATAL_ERROR "the demo was to die at step 8 and to leave a checkpoint of step 5: exit code ${result}")
endif()
file(COPY "${OUTPUT}/run/" DESTINATION "${OUTPUT}/copy")

# The losses of steps 6 to 12, which are all that are written.
function(resume name ranks)
  file(REMOVE_RECURSE "${OUTPUT}/run")
  file(COPY "${OUTPUT}/copy/" DESTINATION "${OUTPUT}/run")
  set(losses "${OUTPUT}/${name}.txt")
  execute_process(COMMAND "${RUN}" -n ${ranks} --timeout 110s --no-prefix "${PROGRAM}" --device cpu --steps 12 --progress none --losses "${losses}"
      --checkpoint "${OUTPUT}/run" ${checkpoint} ${ARGN}
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  file(STRINGS "${losses}" lines)
  set(${name} "${lines}" PARENT_SCOPE)
endfunction()

resume(same 2 --parallel fsdp)
resume(three 3 --parallel zero)
resume(layers 4 --parallel fsdp+tp)
list(SUBLIST whole 5 -1 whole)
expect_same_bits(whole same)
expect_same_digits(whole three layers)
