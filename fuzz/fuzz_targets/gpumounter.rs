//! GPUMounter's HTTP paths: no request makes the reader panic, and what is added is never nothing.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::dialect::gpumounter::{self, Request};

fuzz_target!(|request: (&str, &str, Vec<&str>)| {
    let (method, path, uuids) = request;
    match gpumounter::read(method, path, &uuids) {
        Ok(Request::Add(add)) => assert!((1..=1024).contains(&add.count)),
        Ok(Request::Remove(remove)) => assert!(!remove.uuids.is_empty()),
        Err(refusal) => assert!(matches!(refusal.status, 400 | 404 | 405) && refusal.body.ends_with('\n')),
    }
});
