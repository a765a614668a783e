# Built with -DHERRING_BENCHMARKS=ON: latency and bandwidth of the transport alone.
add_executable(fabric_bench ${CMAKE_SOURCE_DIR}/benchmarks/fabric_bench.cc)
target_link_libraries(fabric_bench PRIVATE herring_efa)
