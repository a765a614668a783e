#Included by the top CMakeLists.txt with - DHERRING_BENCHMARKS = ON.
add_executable(fabric_bench ${CMAKE_SOURCE_DIR} / benchmarks / fabric_bench.cc)
    target_link_libraries(fabric_bench PRIVATE herring_efa)
