# SPDX-License-Identifier: Apache-2.0
# Flags that everything shares, and short ways to declare libraries and programs.

add_library(evmm_flags INTERFACE)
# Nobody replaces our functions by preloading others: they may be inlined though they are exported.
target_compile_options(evmm_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fno-semantic-interposition>)
set(evmm_warnings -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # GCC 13 sees overflows in the inlined buffers of fmt and std::vector, and uninitialised parts of
  # std::optional, that are not there.
  list(APPEND evmm_warnings -Wno-array-bounds -Wno-stringop-overflow -Wno-maybe-uninitialized)
endif()
if(EVMM_WARNINGS_AS_ERRORS)
  list(APPEND evmm_warnings -Werror)
endif()
target_compile_options(evmm_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${evmm_warnings}>")
if(EVMM_HAVE_CUDA)
  list(JOIN evmm_warnings "," evmm_cuda_warnings)
  target_compile_options(evmm_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xcompiler=${evmm_cuda_warnings}>")
endif()
if(EVMM_SANITIZE)
  target_compile_options(evmm_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${EVMM_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
  target_link_options(evmm_flags INTERFACE "-fsanitize=${EVMM_SANITIZE}")
endif()
if(EVMM_DEBUG_CHECKS)
  target_compile_definitions(evmm_flags INTERFACE EVMM_DEBUG_CHECKS=1)
endif()

# A library of the package: evmm_library(core) makes evmm_core, evmm::core.
function(evmm_library name)
  add_library(evmm_${name})
  add_library(evmm::${name} ALIAS evmm_${name})
  set_target_properties(evmm_${name} PROPERTIES EXPORT_NAME ${name}
    VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
  target_include_directories(evmm_${name}
    PUBLIC "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
           "$<BUILD_INTERFACE:${PROJECT_BINARY_DIR}/include>"
           "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>"
    PRIVATE "${PROJECT_SOURCE_DIR}")
  target_compile_features(evmm_${name} PUBLIC cxx_std_20)
  if(BUILD_SHARED_LIBS AND NOT EVMM_SANITIZE)
    # What another library of evmm uses must be visible; found here rather than at run time.
    target_link_options(evmm_${name} PRIVATE -Wl,--no-undefined)
  endif()
  target_link_libraries(evmm_${name} PRIVATE "$<BUILD_INTERFACE:evmm_flags>")
endfunction()

# A program: evmm_program(name SOURCES ... LIBRARIES ...). Internal headers are in reach.
function(evmm_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBRARIES" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE evmm_flags ${arg_LIBRARIES})
endfunction()

# How tests start ranks: `${evmm_mpirun} -np N program`.
if(EVMM_HAVE_MPI)
  set(evmm_mpirun "${MPIEXEC_EXECUTABLE}" --oversubscribe --bind-to none --mca mpi_yield_when_idle 1
    # Copies between processes by ptrace rights, which many containers refuse.
    --mca btl_vader_single_copy_mechanism none)
  execute_process(COMMAND id -u OUTPUT_VARIABLE evmm_user OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(evmm_user STREQUAL "0")
    list(APPEND evmm_mpirun --allow-run-as-root)
  endif()
  # Open MPI leaks at its end, from plug-ins that are unloaded by then, so that no suppression can
  # name them. The same code is searched for leaks where ranks are threads.
  if(EVMM_SANITIZE MATCHES address)
    list(APPEND evmm_mpirun -x ASAN_OPTIONS=detect_leaks=0)
  endif()
endif()
