//! Files that stand in for the libraries of a driver.
//!
//! One shared object has the functions of all of them. Out of it come files that each export what one library exports,
//! under its names and with its soname, and that may ask for another file first ([`elf`]); they are put in their places
//! whole, with the links that programs look for ([`files`]).

pub mod elf;
pub mod files;

pub use elf::{ElfError, Form, Patch};
pub use files::{Found, InstallError};
