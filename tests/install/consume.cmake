# SPDX-License-Identifier: Apache-2.0
# Installs evmm into a fresh prefix and builds and runs two programs against it: one through
# find_package, one through pkg-config. The prefix is moved first, since packages get relocated.
# With `shared` set, evmm is built first, as that kind of library and without CUDA.
cmake_minimum_required(VERSION 3.25)

function(run)
  list(JOIN ARGN " " line)
  message(STATUS "${line}")
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE "${work}/staged" "${work}/prefix" "${work}/by_package"
  "${work}/ep_by_package")
file(MAKE_DIRECTORY "${work}")
set(common -G "${generator}" "-DCMAKE_MAKE_PROGRAM=${make_program}" "-DCMAKE_CXX_COMPILER=${compiler}"
  "-DCMAKE_CXX_COMPILER_LAUNCHER=${launcher}" "-DCMAKE_BUILD_TYPE=${config}")

if(DEFINED shared)
  set(build "${work}/evmm")
  # The quickest to build. CMAKE_CXX_FLAGS would stand before the configuration's own -O2.
  string(TOUPPER "${config}" flags_of)
  run("${CMAKE_COMMAND}" -S "${source}" -B "${build}" ${common}
    "-DCMAKE_CXX_FLAGS_${flags_of}=-O0 -g0 -DNDEBUG"
    "-DBUILD_SHARED_LIBS=${shared}" "-DCMAKE_INSTALL_LIBDIR=${libdir}" -DEVMM_CUDA=OFF
    -DEVMM_TESTS=OFF -DEVMM_EXAMPLES=OFF -DEVMM_BENCHMARKS=OFF)
  run("${CMAKE_COMMAND}" --build "${build}" -j 2)
endif()
run("${CMAKE_COMMAND}" --install "${build}" --config "${config}" --prefix "${work}/staged")
file(RENAME "${work}/staged" "${work}/prefix")

run("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}/consumer" -B "${work}/by_package" ${common}
  "-DCMAKE_PREFIX_PATH=${work}/prefix")
run("${CMAKE_COMMAND}" --build "${work}/by_package")
run("${work}/by_package/consumer")

# The modules that are installed: evmm-comm stands on evmm-core.
set(module evmm-core)
set(definition "")
if(EXISTS "${work}/prefix/${libdir}/pkgconfig/evmm-comm.pc")
  set(module evmm-comm)
  set(definition -DCONSUMER_HAS_COMM=1)
endif()
set(ENV{PKG_CONFIG_PATH} "${work}/prefix/${libdir}/pkgconfig")
execute_process(COMMAND "${pkg_config}" --cflags --libs ${module}
  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
run("${compiler}" -std=c++20 ${definition} "${CMAKE_CURRENT_LIST_DIR}/consumer/consumer.cpp"
  -o "${work}/by_pkg_config" ${flags} "-Wl,-rpath,${work}/prefix/${libdir}")
run("${work}/by_pkg_config")

# A component brings what it stands on: evmm::ep alone is enough to ask for.
if(EXISTS "${work}/prefix/${libdir}/pkgconfig/evmm-ep.pc")
  run("${CMAKE_COMMAND}" -S "${CMAKE_CURRENT_LIST_DIR}/ep_consumer" -B "${work}/ep_by_package"
    ${common} "-DCMAKE_PREFIX_PATH=${work}/prefix")
  run("${CMAKE_COMMAND}" --build "${work}/ep_by_package")
  run("${work}/ep_by_package/ep_consumer")
  execute_process(COMMAND "${pkg_config}" --cflags --libs evmm-ep
    OUTPUT_VARIABLE ep_flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(ep_flags UNIX_COMMAND "${ep_flags}")
  run("${compiler}" -std=c++20 "${CMAKE_CURRENT_LIST_DIR}/ep_consumer/ep_consumer.cpp"
    -o "${work}/ep_by_pkg_config" ${ep_flags} "-Wl,-rpath,${work}/prefix/${libdir}")
  run("${work}/ep_by_pkg_config")
endif()

# The example that the top README begins with.
if(module STREQUAL "evmm-comm")
  file(READ "${source}/README.md" readme)
  string(REGEX MATCH "```cpp\n(([^`]|`[^`])*)```" block "${readme}")
  file(WRITE "${work}/readme_example.cpp" "${CMAKE_MATCH_1}")
  run("${compiler}" -std=c++20 -Wall -Wextra -Werror "${work}/readme_example.cpp"
    -o "${work}/readme_example" ${flags} "-Wl,-rpath,${work}/prefix/${libdir}")
endif()

# The installed program starts from where it lies.
if(EXISTS "${work}/prefix/bin/evmm")
  run("${work}/prefix/bin/evmm" --version)
endif()

# A C program on libevmm_torch.so alone, and its Python module, which finds the library from where
# it lies.
execute_process(COMMAND "${pkg_config}" --cflags --libs evmm-torch
  OUTPUT_VARIABLE flags OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
run("${compiler}" -x c -std=c11 -Wall -Wextra -Werror
  "${CMAKE_CURRENT_LIST_DIR}/consumer/torch_consumer.c" -x none -o "${work}/torch_consumer" ${flags}
  "-Wl,-rpath,${work}/prefix/${libdir}")
set(ENV{EVMM_DRIVER} host)
run("${work}/torch_consumer")
if(python)
  set(ENV{PYTHONPATH} "${work}/prefix/share/evmm/python")
  unset(ENV{EVMM_TORCH_LIBRARY})
  run("${python}" -B -c
    "import evmm_torch; print(evmm_torch.library_path(), evmm_torch.version(), len(evmm_torch.memory_stats(0)))")
endif()
