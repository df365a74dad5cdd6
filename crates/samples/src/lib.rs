//! What programs that use a GPU through the driver API begin with: the library found by its name, a context, memory, a
//! kernel that takes a known time. The samples and the tests' workloads are made of it.

pub mod driver;
