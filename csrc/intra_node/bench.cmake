# Built with -DHERRING_BENCHMARKS=ON: how the shared-memory path stands to what the machine allows.
add_executable(intra_node_bench ${CMAKE_SOURCE_DIR}/benchmarks/intra_node_bench.cc)
target_link_libraries(intra_node_bench PRIVATE herring_intra_node herring_server)

# What the machine allows where tensors lie in memory that is not shared.
add_executable(private_memory_bench ${CMAKE_SOURCE_DIR}/benchmarks/private_memory_bench.cc)
target_link_libraries(private_memory_bench PRIVATE herring_server)
