//! The table has the names that real drivers export, and answers `cuGetProcAddress` as they do.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_driver_api::cuda;
use partage_driver_api::exports::{DriverVersion, Library, VARIABLES, exports, since, twin};
use partage_driver_api::proc_address::{Lookup, proc_address};
use std::collections::{BTreeMap, BTreeSet};

const LISTS: [(Library, DriverVersion, &str); 4] = [
    (Library::Cuda, DriverVersion::R535, include_str!("symbols/libcuda-535.txt")),
    (Library::Cuda, DriverVersion::R550, include_str!("symbols/libcuda-550.txt")),
    (Library::Nvml, DriverVersion::R535, include_str!("symbols/libnvidia-ml-535.txt")),
    (Library::Nvml, DriverVersion::R550, include_str!("symbols/libnvidia-ml-550.txt")),
];

const MAPS: [(DriverVersion, &str); 2] = [
    (DriverVersion::R535, include_str!("symbols/cuGetProcAddress-535.txt")),
    (DriverVersion::R550, include_str!("symbols/cuGetProcAddress-550.txt")),
];

fn list(text: &'static str) -> BTreeSet<&'static str> {
    text.lines().collect()
}

/// The rows of a map: name and flags, to first version and symbol in ascending order.
fn map(text: &'static str) -> BTreeMap<(&'static str, u64), Vec<(i32, &'static str)>> {
    let mut map = BTreeMap::<_, Vec<_>>::new();
    for row in text.lines() {
        let mut words = row.split(' ');
        let name = words.next().unwrap();
        let flags = words.next().unwrap().strip_prefix("f=").unwrap().parse().unwrap();
        let version = words.next().unwrap().strip_prefix("v=").unwrap().parse().unwrap();
        assert_eq!(words.next(), Some("->"));
        map.entry((name, flags)).or_default().push((version, words.next().unwrap()));
    }
    map
}

#[test]
fn exports_are_those_of_the_real_libraries() {
    for (library, driver, text) in LISTS {
        let ours: Vec<_> = exports(library, driver).collect();
        assert_eq!(ours.len(), text.lines().count(), "{library:?} {driver:?}: a name twice");
        assert_eq!(ours.into_iter().collect::<BTreeSet<_>>(), list(text), "{library:?} {driver:?}");
    }
}

#[test]
fn a_name_is_as_old_as_the_first_driver_that_has_it() {
    for library in Library::ALL {
        let [old, new] =
            [0, 1].map(|at| list(LISTS.iter().filter(|entry| entry.0 == library).nth(at).unwrap().2));
        for name in new {
            let first = if old.contains(name) { DriverVersion::R535 } else { DriverVersion::R550 };
            assert_eq!(since(library, name), first, "{name}");
        }
    }
}

#[test]
fn every_per_thread_name_is_the_twin_of_the_name_it_extends() {
    for name in exports(Library::Cuda, DriverVersion::R550) {
        if let Some(base) = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds")) {
            assert_eq!(twin(base), Some(name));
            assert_eq!(since(Library::Cuda, base), since(Library::Cuda, name));
        } else if let Some(twin) = twin(name) {
            assert!(
                [format!("{name}_ptsz"), format!("{name}_ptds")].contains(&twin.to_owned()),
                "{name}: {twin}"
            );
        }
    }
}

#[test]
fn the_debuggers_variables_are_exported() {
    let exported: BTreeSet<_> = exports(Library::Cuda, DriverVersion::R535).collect();
    assert!(VARIABLES.iter().all(|(name, bytes)| exported.contains(name) && *bytes >= 4));
}

#[test]
fn every_row_of_the_real_map_is_answered() {
    for (driver, text) in MAPS {
        for ((name, flags), rows) in map(text) {
            // The driver takes the bit of the legacy stream and does nothing with it.
            for flags in [flags, flags | 1] {
                let ask = |version| proc_address(driver, name, version, flags);
                let (first, _) = rows[0];
                assert_eq!(ask(first - 1), Lookup::NewerThanAsked, "{driver:?} {name} {flags}");
                assert_eq!(ask(0), Lookup::NewerThanAsked, "{driver:?} {name} {flags}");
                for (at, (version, symbol)) in rows.iter().enumerate() {
                    let last = rows.get(at + 1).map_or(i32::MAX, |next| next.0 - 1);
                    for version in [*version, last] {
                        assert_eq!(
                            ask(version),
                            Lookup::Symbol(symbol),
                            "{driver:?} {name} {version} {flags}"
                        );
                    }
                }
                assert_eq!(ask(-1), Lookup::Symbol(rows.last().unwrap().1), "{driver:?} {name} {flags}");
            }
        }
    }
}

#[test]
fn no_name_is_answered_that_the_real_driver_does_not_know() {
    for (driver, text) in MAPS {
        let known = map(text);
        let names = exports(Library::Cuda, DriverVersion::R550).chain(["", "cu", "cuNothing", "cuMemAlloc "]);
        for name in names {
            let ours = proc_address(driver, name, i32::MAX, 0);
            assert_eq!(
                ours == Lookup::Unknown,
                !known.contains_key(&(name, 0)),
                "{driver:?} {name}: {ours:?}"
            );
        }
        for name in
            ["cuMemAlloc_v2", "cuMemcpy_ptds", "cuGetProcAddress_v2", "cudbgMain", "cuMemGetAttribute"]
        {
            assert_eq!(proc_address(driver, name, 12040, 0), Lookup::Unknown, "{driver:?} {name}");
        }
        for flags in 4..10 {
            assert_eq!(proc_address(driver, "cuMemcpy", 12000, flags), Lookup::BadFlags);
        }
    }
}

#[test]
fn an_answer_is_always_a_name_that_the_driver_exports() {
    for (driver, text) in MAPS {
        let exported: BTreeSet<_> = exports(Library::Cuda, driver).collect();
        for (name, flags) in map(text).into_keys() {
            match proc_address(driver, name, i32::MAX, flags) {
                Lookup::Symbol(symbol) => assert!(exported.contains(symbol), "{driver:?} {name}: {symbol}"),
                other => panic!("{driver:?} {name}: {other:?}"),
            }
        }
    }
}

#[test]
fn failures_have_their_names_and_texts() {
    assert!(cuda::CODES.is_sorted_by_key(|entry| entry.0));
    assert_eq!(cuda::name(2).unwrap(), c"CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(cuda::text(2).unwrap(), c"out of memory");
    assert_eq!(cuda::name(0).unwrap(), c"CUDA_SUCCESS");
    assert_eq!(cuda::name(12345), None);
    assert_eq!(cuda::CudaError::OUT_OF_MEMORY.to_string(), "out of memory");
    assert_eq!(cuda::status(Err(cuda::CudaError::NO_DEVICE)), 100);
    assert_eq!(cuda::status(Ok(())), 0);
    assert_eq!(cuda::check(0), Ok(()));
    assert_eq!(cuda::check(12345).unwrap_err().code(), 12345);
    assert!(partage_driver_api::nvml::CODES.is_sorted_by_key(|entry| entry.0));
    // cuGetErrorName of the real drivers knows 93 and 98 codes.
    let known = |driver: DriverVersion| (0..1100).filter(|code| driver.knows(*code)).count();
    assert_eq!(known(DriverVersion::R535), 93);
    assert_eq!(known(DriverVersion::R550), 98);
}
