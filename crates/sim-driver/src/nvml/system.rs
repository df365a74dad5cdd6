//! System queries: driver versions and process names. There are no S-class units.

use super::arguments::{NvmlResult, write_out, write_out_text};
use super::session::session;
use super::{Library, NvmlError, NvmlSystem, NvmlUnits, c_char, nvmlHwbcEntry_t, nvmlReturn_t, text};

/// Returns the description of a status code; the only function that does not return one.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: nvmlReturn_t) -> *const c_char {
    text(code).unwrap_or(c"unknown error").as_ptr()
}

impl NvmlSystem for Library {
    unsafe fn nvmlSystemGetCudaDriverVersion(version: *mut i32) -> NvmlResult {
        write_out!(version => session()?.config().driver.cuda())
    }

    unsafe fn nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) -> NvmlResult {
        write_out!(version => session()?.config().driver.cuda())
    }

    unsafe fn nvmlSystemGetDriverVersion(version: *mut c_char, length: u32) -> NvmlResult {
        write_out_text!(version, length, session()?.config().driver.version())
    }

    unsafe fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: u32) -> NvmlResult {
        write_out_text!(version, length, format!("12.{}", session()?.config().driver.version()))
    }

    unsafe fn nvmlSystemGetHicVersion(
        hwbc_count: *mut u32,
        _hwbc_entries: *mut nvmlHwbcEntry_t,
    ) -> NvmlResult {
        session()?;
        write_out!(hwbc_count => 0)
    }

    unsafe fn nvmlSystemGetProcessName(pid: u32, name: *mut c_char, length: u32) -> NvmlResult {
        let session = session()?;
        if length == 0 {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        let mut found = process_name(session, pid).ok_or(NvmlError::NOT_FOUND)?;
        // A long name is truncated.
        while found.len() >= length as usize {
            found.pop();
        }
        write_out_text!(name, length, found)
    }
}

/// Returns the name of any process of the machine, not only of those on a GPU.
fn process_name(session: &super::session::Session, pid: u32) -> Option<String> {
    // In a container the node's pids differ from the local ones, so the node's list is searched first.
    let listed = (0..session.cards.len())
        .flat_map(|gpu| session.state.processes(gpu))
        .find(|process| process.pid == pid)
        .map(|process| process.name);
    if listed.as_ref().is_some_and(|name| !name.is_empty()) {
        return listed;
    }
    let called = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let first = called.split(|&byte| byte == 0).next().unwrap_or_default();
    Some(String::from_utf8_lossy(first).into_owned())
}

impl NvmlUnits for Library {
    unsafe fn nvmlUnitGetCount(count: *mut u32) -> NvmlResult {
        session()?;
        write_out!(count => 0)
    }

    unsafe fn nvmlUnitGetHandleByIndex(_index: u32, _unit: *mut super::nvmlUnit_t) -> NvmlResult {
        session()?;
        Err(NvmlError::INVALID_ARGUMENT)
    }
}
