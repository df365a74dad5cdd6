//! Creates files that replace the libraries of a driver.
//!
//! One shared object has the functions of all libraries. [`elf`] rewrites it into files that each export the names of
//! one library, have its soname, and may need another library first. [`library_files`] locates the shared object and
//! installs the files atomically, with the symbolic links that programs look for.
//!
//! The crate parses and writes ELF itself: with `object::build` (0.40) the rewriter would be less than half as long,
//! but its writer panics or requests unbounded memory on some malformed files, which must be an error here.

pub mod elf;
pub mod library_files;

pub use elf::{ElfError, MarkerPatch, RewriteSpec};
pub use library_files::{InstallError, SharedObject};
