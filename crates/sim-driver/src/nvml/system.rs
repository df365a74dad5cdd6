//! The node: driver, versions, processes' names; and what it has none of, S-class units.

use super::call::{Answer, answer, answer_text};
use super::session::session;
use super::{Library, NvmlError, System, Units, c_char, nvmlHwbcEntry_t, nvmlReturn_t, text};

/// What a code means, in a few words: the one function that does not return a code.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: nvmlReturn_t) -> *const c_char {
    text(code).unwrap_or(c"unknown error").as_ptr()
}

impl System for Library {
    unsafe fn nvmlSystemGetCudaDriverVersion(version: *mut i32) -> Answer {
        answer!(version => session()?.config().driver.cuda())
    }

    unsafe fn nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) -> Answer {
        answer!(version => session()?.config().driver.cuda())
    }

    unsafe fn nvmlSystemGetDriverVersion(version: *mut c_char, length: u32) -> Answer {
        answer_text!(version, length, session()?.config().driver.version())
    }

    unsafe fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: u32) -> Answer {
        answer_text!(version, length, format!("12.{}", session()?.config().driver.version()))
    }

    unsafe fn nvmlSystemGetHicVersion(hwbc_count: *mut u32, _hwbc_entries: *mut nvmlHwbcEntry_t) -> Answer {
        session()?;
        answer!(hwbc_count => 0)
    }

    unsafe fn nvmlSystemGetProcessName(pid: u32, name: *mut c_char, length: u32) -> Answer {
        let session = session()?;
        if length == 0 {
            return Err(NvmlError::INVALID_ARGUMENT);
        }
        let mut found = name_of(session, pid).ok_or(NvmlError::NOT_FOUND)?;
        // A name that is too long is cut.
        while found.len() >= length as usize {
            found.pop();
        }
        answer_text!(name, length, found)
    }
}

/// How a process was called: any process of the machine, not only those on a GPU.
fn name_of(session: &super::session::Session, pid: u32) -> Option<String> {
    // In a container the node's pids are others than one's own: the node's list goes first.
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

impl Units for Library {
    unsafe fn nvmlUnitGetCount(count: *mut u32) -> Answer {
        session()?;
        answer!(count => 0)
    }

    unsafe fn nvmlUnitGetHandleByIndex(_index: u32, _unit: *mut super::nvmlUnit_t) -> Answer {
        session()?;
        Err(NvmlError::INVALID_ARGUMENT)
    }
}
