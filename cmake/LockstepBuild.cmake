# Compiler settings shared by every target: warnings, sanitizers, ccache, linker.

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(LOCKSTEP_CCACHE ccache)
  if(LOCKSTEP_CCACHE)
    # Precompiled headers are cacheable only with these sloppiness flags; the base directory lets clones share a cache. Dependencies that
    # the compiler lists anyway spare ccache a run of the preprocessor where it has nothing yet.
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1 CCACHE_DEPEND=1 "${LOCKSTEP_CCACHE}")
  endif()
endif()

set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")

function(lockstep_compile_options target)
  target_compile_options(${target} PRIVATE -Wall -Wextra $<$<BOOL:${LOCKSTEP_WERROR}>:-Werror> -fno-omit-frame-pointer)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ccache needs the first to hash the headers inside a precompiled one; g++ 12 sees overlaps in "text" + string that are not there.
    target_compile_options(${target} PRIVATE -fpch-preprocess -Wno-restrict)
    if(CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
      # g++ 13 takes a reference into what an IValue refers to for one into the IValue.
      target_compile_options(${target} PRIVATE -Wno-dangling-reference)
    endif()
  endif()
  if(LOCKSTEP_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${LOCKSTEP_SANITIZE} -fno-sanitize-recover=all -g1)
    # With the checks in between g++ 12 no longer sees that optionals are filled before they are read.
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    if(LOCKSTEP_SANITIZE MATCHES "undefined")
      # libtorch ships without the type information vptr checks need.
      target_compile_options(${target} PRIVATE -fno-sanitize=vptr)
    endif()
    target_link_options(${target} PRIVATE -fsanitize=${LOCKSTEP_SANITIZE})
  endif()
endfunction()

# Compiles the files of a layer together, up to `most` in one go: what they include is read once instead of once for each, which is where
# nearly all the time goes. CMake leaves out files with flags of their own. LOCKSTEP_UNITY=OFF is for those who edit one file over and over.
function(lockstep_unity target most)
  if(NOT LOCKSTEP_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cpp$")
  if(LOCKSTEP_MUTANTS)  # which stand in the places of others
    string(REPLACE "${LOCKSTEP_MUTANTS}/" "${PROJECT_SOURCE_DIR}/" sources "${sources}")
  endif()
  list(SORT sources)
  if(LOCKSTEP_MUTANTS)
    lockstep_take_mutants(sources)
  endif()
  set(layers)
  foreach(source IN LISTS sources)
    cmake_path(ABSOLUTE_PATH source)
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE layer)
    string(REGEX REPLACE "^(.*lockstep/)?([^/]*)/.*" "\\2" layer "${layer}")
    list(APPEND layers ${layer})
    list(APPEND files_${layer} "${source}")
  endforeach()
  list(REMOVE_DUPLICATES layers)
  foreach(layer IN LISTS layers)
    list(LENGTH files_${layer} count)
    math(EXPR batches "(${count} + ${most} - 1) / ${most}")
    set(index 0)
    foreach(source IN LISTS files_${layer})
      math(EXPR batch "${index} * ${batches} / ${count}")
      set_source_files_properties("${source}" PROPERTIES UNITY_GROUP "${layer}_${batch}")
      math(EXPR index "${index} + 1")
    endforeach()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ takes a source that another file includes for a header.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

# Puts sources with faults in the place of those without; see tools/mutants.py.
function(lockstep_take_mutants sources)
  set(taken)
  foreach(source IN LISTS ${sources})
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE name)
    if(EXISTS "${LOCKSTEP_MUTANTS}/${name}")
      set(source "${LOCKSTEP_MUTANTS}/${name}")
    endif()
    list(APPEND taken "${source}")
  endforeach()
  set(${sources} ${taken} "${LOCKSTEP_MUTANTS}/lockstep_mutant.cpp" PARENT_SCOPE)
  include_directories("${LOCKSTEP_MUTANTS}")
  if(LOCKSTEP_GOOGLETEST_DIR)
    include_directories(SYSTEM "${LOCKSTEP_GOOGLETEST_DIR}/googletest/include")
  endif()
endfunction()

# For programs that spend their time in libraries: compiled in half the time, as they are run a few times only.
function(lockstep_compile_quickly target)
  target_compile_options(${target} PRIVATE -O0)
endfunction()

# Leaves in the list what users may include: a header whose opening comment says "Internal" is not installed.
function(lockstep_public_headers list)
  foreach(header IN LISTS ${list})
    file(READ "${header}" text LIMIT 2000)
    string(REGEX REPLACE "#pragma once.*" "" opening "${text}")
    if(NOT opening MATCHES "Internal[ \n.:;]")
      list(APPEND public "${header}")
    endif()
  endforeach()
  set(${list} "${public}" PARENT_SCOPE)
endfunction()
