//! GPUMounter's HTTP requests: no request causes a panic, and every parsed request names at least one GPU.
#![no_main]

use libfuzzer_sys::fuzz_target;
use partage_core::dialect::gpumounter::{self, GpuMounterRequest};

fuzz_target!(|request: (&str, &str, Vec<&str>)| {
    let (method, path, uuids) = request;
    match gpumounter::read(method, path, &uuids) {
        Ok(GpuMounterRequest::Add(add)) => assert!((1..=1024).contains(&add.count)),
        Ok(GpuMounterRequest::Remove(remove)) => assert!(!remove.uuids.is_empty()),
        Err(error) => assert!(matches!(error.status, 400 | 404 | 405) && error.body.ends_with('\n')),
    }
});
