# SPDX-License-Identifier: Apache-2.0
# Install rules: libraries, headers, the config package, pkg-config files, the program.
#
# A static evmm needs its dependencies again at the user's link. What they are is read from the
# targets, so that the package cannot forget one; each must be known here.

include(CMakePackageConfigHelpers)

set(evmm_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/evmm")
file(RELATIVE_PATH evmm_prefix_from_pc "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" evmm_prefix_from_pc "${evmm_prefix_from_pc}")
set(evmm_components "")
foreach(component IN ITEMS core comm ep torch)
  if(TARGET evmm_${component})
    list(APPEND evmm_components ${component})
  endif()
endforeach()

# evmm_dependency(item find requires libs): for one item of a link line, the lines that find it in
# the config package, the pkg-config module, and the plain libraries where there is no module.
function(evmm_dependency item find requires libs)
  set(find_lines "")
  set(module "")
  set(plain "")
  if(item MATCHES "^(evmm_.*|evmm::.*|\\$<BUILD_INTERFACE:.*)$")  # between components; flags
  elseif(item STREQUAL "Threads::Threads")
    set(find_lines "find_dependency(Threads)")
    set(plain "-pthread")
  elseif(item STREQUAL "dl")
    set(plain "-ldl")
  elseif(item STREQUAL "rt")
    set(plain "-lrt")
  elseif(item STREQUAL "fmt::fmt")
    set(find_lines "find_dependency(fmt)")
    set(module "fmt")
  elseif(item STREQUAL "spdlog::spdlog")
    set(find_lines "find_dependency(spdlog)")
    set(module "spdlog")
  elseif(item STREQUAL "PkgConfig::hwloc")
    string(JOIN "\n" find_lines "find_dependency(PkgConfig)"
      "pkg_check_modules(hwloc QUIET IMPORTED_TARGET hwloc)"
      "if(NOT hwloc_FOUND)"
      "  set(evmm_FOUND FALSE)"
      "  set(evmm_NOT_FOUND_MESSAGE \"evmm needs hwloc, which pkg-config does not find\")"
      "  return()"
      "endif()")
    set(module "hwloc")
  elseif(item STREQUAL "ZLIB::ZLIB")
    set(find_lines "find_dependency(ZLIB)")
    set(module "zlib")
  elseif(item STREQUAL "nlohmann_json::nlohmann_json")
    set(find_lines "find_dependency(nlohmann_json)")
  elseif(item STREQUAL "MPI::MPI_CXX")
    set(find_lines "set(MPI_CXX_SKIP_MPICXX ON)\nfind_dependency(MPI COMPONENTS CXX)")
    list(JOIN MPI_CXX_LIBRARIES " " plain)
  elseif(item MATCHES "^CUDA::")
    set(find_lines "find_dependency(CUDAToolkit)")
    string(REPLACE "CUDA::" "" library "${item}")
    if(TARGET ${item})
      set(plain "-L${CUDAToolkit_LIBRARY_DIR} -l${library}")
    endif()
  else()
    message(FATAL_ERROR "evmm_install.cmake does not know the dependency '${item}'")
  endif()
  set(${find} "${find_lines}" PARENT_SCOPE)
  set(${requires} "${module}" PARENT_SCOPE)
  set(${libs} "${plain}" PARENT_SCOPE)
endfunction()

set(evmm_find_dependencies "")
foreach(component IN LISTS evmm_components)
  get_target_property(evmm_links evmm_${component} LINK_LIBRARIES)
  get_target_property(evmm_public_links evmm_${component} INTERFACE_LINK_LIBRARIES)
  get_target_property(evmm_type evmm_${component} TYPE)
  set(evmm_finds "")
  set(evmm_modules "")
  set(evmm_plain "")
  set(evmm_module_others "")
  foreach(item IN LISTS evmm_links)
    # What a component stands on, with what that needs. evmm_torch carries or brings its own.
    if(item IN_LIST evmm_public_links AND item MATCHES "^evmm_(.+)$")
      string(APPEND evmm_module_others "evmm-${CMAKE_MATCH_1} = ${PROJECT_VERSION}")
      list(APPEND evmm_finds ${evmm_finds_of_${CMAKE_MATCH_1}})
    endif()
    evmm_dependency("${item}" evmm_find evmm_module evmm_libs)
    # Users of a shared library look only for what is in its interface.
    if(evmm_type STREQUAL "STATIC_LIBRARY" OR item IN_LIST evmm_public_links)
      list(APPEND evmm_finds "${evmm_find}")
    endif()
    list(APPEND evmm_modules ${evmm_module})
    list(APPEND evmm_plain ${evmm_libs})
  endforeach()
  list(REMOVE_ITEM evmm_finds "")
  list(REMOVE_DUPLICATES evmm_finds)
  set(evmm_finds_of_${component} ${evmm_finds})
  list(REMOVE_DUPLICATES evmm_modules)
  list(REMOVE_DUPLICATES evmm_plain)
  list(JOIN evmm_plain " " evmm_plain)

  # The config package: a component's dependencies are looked for only when it is asked for.
  if(evmm_finds)
    list(JOIN evmm_finds "\n" evmm_finds)
    string(REPLACE "\n" "\n  " evmm_finds "${evmm_finds}")
    string(APPEND evmm_find_dependencies
      "if(${component} IN_LIST evmm_wanted)\n  ${evmm_finds}\nendif()\n")
  endif()

  # pkg-config: a shared library brings its own; a static one needs them on the plain link line.
  list(JOIN evmm_modules " " evmm_modules)
  if(evmm_type STREQUAL "STATIC_LIBRARY")
    string(STRIP "${evmm_module_others} ${evmm_modules}" evmm_pc_requires)
    string(REPLACE "${PROJECT_VERSION} " "${PROJECT_VERSION}, " evmm_pc_requires "${evmm_pc_requires}")
    set(evmm_pc_requires_private "")
    set(evmm_pc_libs " ${evmm_plain}")
    set(evmm_pc_libs_private "")
  else()
    set(evmm_pc_requires "${evmm_module_others}")
    set(evmm_pc_requires_private "${evmm_modules}")
    set(evmm_pc_libs "")
    set(evmm_pc_libs_private "${evmm_plain}")
  endif()
  set(evmm_pc_component ${component})
  configure_file("${CMAKE_CURRENT_LIST_DIR}/evmm.pc.in" "${PROJECT_BINARY_DIR}/evmm-${component}.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/evmm-${component}.pc"
    DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")

  set_target_properties(evmm_${component} PROPERTIES INSTALL_RPATH "$ORIGIN")
  install(TARGETS evmm_${component} EXPORT evmmTargets
    LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endforeach()

install(EXPORT evmmTargets NAMESPACE evmm:: DESTINATION "${evmm_package_dir}")
configure_package_config_file("${CMAKE_CURRENT_LIST_DIR}/evmmConfig.cmake.in"
  "${PROJECT_BINARY_DIR}/evmmConfig.cmake" INSTALL_DESTINATION "${evmm_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/evmmConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/evmmConfig.cmake" "${PROJECT_BINARY_DIR}/evmmConfigVersion.cmake"
  DESTINATION "${evmm_package_dir}")

install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh" PATTERN "*.h")
install(FILES "${PROJECT_BINARY_DIR}/include/evmm/version.hpp"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/evmm")
install(FILES "${PROJECT_SOURCE_DIR}/lib/torch/evmm_torch.py"
  DESTINATION "${CMAKE_INSTALL_DATADIR}/evmm/python")
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" DESTINATION "${CMAKE_INSTALL_DOCDIR}")

# The `evmm` program.
if(TARGET evmm_cli)
  file(RELATIVE_PATH evmm_lib_from_bin "/${CMAKE_INSTALL_BINDIR}" "/${CMAKE_INSTALL_LIBDIR}")
  set_target_properties(evmm_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${evmm_lib_from_bin}")
  install(TARGETS evmm_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()
