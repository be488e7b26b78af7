# Compiler settings shared by every target: warnings, sanitizers, ccache, linker.

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(LOCKSTEP_CCACHE ccache)
  if(LOCKSTEP_CCACHE)
    # Precompiled headers are cacheable only with these sloppiness flags; the base directory lets clones share a cache.
    set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${LOCKSTEP_CCACHE}")
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
    if(LOCKSTEP_SANITIZE MATCHES "undefined")
      # libtorch ships without the type information vptr checks need.
      target_compile_options(${target} PRIVATE -fno-sanitize=vptr)
    endif()
    target_link_options(${target} PRIVATE -fsanitize=${LOCKSTEP_SANITIZE})
  endif()
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
