# SPDX-License-Identifier: Apache-2.0
# Installs evmm into a fresh prefix and builds examples/05_user_kernel against it, as the project of
# its own that it is: with its CUDA kernel where evmm has been built with CUDA.
cmake_minimum_required(VERSION 3.25)

function(run)
  list(JOIN ARGN " " line)
  message(STATUS "${line}")
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE "${work}")
run("${CMAKE_COMMAND}" --install "${build}" --config "${config}" --prefix "${work}/prefix")
if(cuda)
  set(cuda_arguments "-DCMAKE_CUDA_COMPILER=${cuda}" "-DCMAKE_CUDA_COMPILER_LAUNCHER=${launcher}")
  # As its README says it, without, where that will do.
  if(NOT architectures STREQUAL "90")
    list(APPEND cuda_arguments "-DCMAKE_CUDA_ARCHITECTURES=${architectures}")
  endif()
else()
  set(cuda_arguments "-DCMAKE_CUDA_COMPILER=NOTFOUND")
endif()
run("${CMAKE_COMMAND}" -S "${source}/examples/05_user_kernel" -B "${work}/build" -G "${generator}"
  "-DCMAKE_MAKE_PROGRAM=${make_program}" "-DCMAKE_CXX_COMPILER=${compiler}"
  "-DCMAKE_CXX_COMPILER_LAUNCHER=${launcher}" "-DCMAKE_BUILD_TYPE=${config}"
  "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror" "-DCMAKE_PREFIX_PATH=${work}/prefix" ${cuda_arguments})
run("${CMAKE_COMMAND}" --build "${work}/build")
