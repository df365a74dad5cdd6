//! A small client of the CUDA driver API: loads the library, creates a context, allocates memory and launches a
//! kernel of a known duration. The samples and the tests' workloads use it.

pub mod cuda_driver;
