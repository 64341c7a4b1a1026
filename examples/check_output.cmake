# SPDX-License-Identifier: Apache-2.0
# cmake -Dexpect=REGEX -Ddriver=host|cuda -P check_output.cmake -- command...
# Passes when the command returns 0 and the last line of its output matches (CTest's
# PASS_REGULAR_EXPRESSION would ignore the code).
if(driver STREQUAL cuda AND NOT EXISTS /dev/nvidiactl)
  message("skipped: there is no GPU")
  return()
endif()

math(EXPR last "${CMAKE_ARGC} - 1")
set(command)
foreach(i RANGE ${last})
  if(DEFINED started)
    list(APPEND command "${CMAKE_ARGV${i}}")
  elseif(CMAKE_ARGV${i} STREQUAL "--")
    set(started ON)
  endif()
endforeach()

execute_process(COMMAND ${command} RESULT_VARIABLE code OUTPUT_VARIABLE output ECHO_OUTPUT_VARIABLE)
if(NOT code EQUAL 0)
  message(FATAL_ERROR "the command returned ${code}")
endif()
string(REGEX MATCH "[^\n]*\n$" last_line "${output}")
if(NOT last_line MATCHES "^${expect}")
  message(FATAL_ERROR "the last line does not match '${expect}'")
endif()
