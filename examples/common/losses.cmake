# What checks of demos share: training runs, and their losses. RUN, PROGRAM and OUTPUT are given.
# One thread and one kind of vector: where a tensor's rest begins that is rounded otherwise must not depend on the machine.
set(ENV{OMP_NUM_THREADS} 1)
set(ENV{ATEN_CPU_CAPABILITY} avx2)
file(MAKE_DIRECTORY "${OUTPUT}")

# The variable `name` becomes the list of losses of twelve steps.
function(train name ranks)
  set(losses "${OUTPUT}/${name}.txt")
  file(REMOVE "${losses}")
  execute_process(COMMAND "${RUN}" -n ${ranks} --timeout 110s --no-prefix "${PROGRAM}" --device cpu --steps 12 --progress none --losses "${losses}" ${ARGN}
    OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
  file(STRINGS "${losses}" lines)
  list(LENGTH lines count)
  if(NOT count EQUAL 12)
    message(FATAL_ERROR "${name}: ${count} losses of 12 steps")
  endif()
  set(${name} "${lines}" PARENT_SCOPE)
endfunction()

function(expect_same_bits expected)
  foreach(other IN LISTS ARGN)
    if(NOT "${${other}}" STREQUAL "${${expected}}")
      message(FATAL_ERROR "losses of ${expected}: ${${expected}}\nlosses of ${other}: ${${other}}")
    endif()
  endforeach()
endfunction()

function(leading_digits losses result)
  list(SUBLIST losses 0 4 first)
  string(REGEX MATCHALL "0x1\\.[0-9a-f][0-9a-f][0-9a-f]" digits "${first}")
  set(${result} "${digits}" PARENT_SCOPE)
endfunction()

# For sums in another order: of the first losses the leading digits are the same.
function(expect_same_digits expected)
  leading_digits("${${expected}}" wanted)
  foreach(other IN LISTS ARGN)
    leading_digits("${${other}}" digits)
    if(NOT "${digits}" STREQUAL "${wanted}")
      message(FATAL_ERROR "losses of ${expected}: ${${expected}}\nlosses of ${other}: ${${other}}")
    endif()
  endforeach()
endfunction()
