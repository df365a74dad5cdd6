//! placeholder until merged
use std::ffi::CStr;
pub(crate) struct Config;
impl Config { pub(crate) fn real_cuda(&self) -> &CStr { c"" } pub(crate) fn real_nvml(&self)->&CStr { c"" } }
pub(crate) fn get() -> &'static Config { &Config }
