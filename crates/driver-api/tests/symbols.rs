//! Compares the table with the exports of real drivers and with their results of `cuGetProcAddress`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use partage_driver_api::cuda;
use partage_driver_api::exports::{DriverLibraryKind, DriverVersion, VARIABLES, exports, since, twin};
use partage_driver_api::proc_address::{ProcAddressLookup, proc_address};
use std::collections::{BTreeMap, BTreeSet};

const LISTS: [(DriverLibraryKind, DriverVersion, &str); 4] = [
    (DriverLibraryKind::Cuda, DriverVersion::R535, include_str!("symbols/libcuda-535.txt")),
    (DriverLibraryKind::Cuda, DriverVersion::R550, include_str!("symbols/libcuda-550.txt")),
    (DriverLibraryKind::Nvml, DriverVersion::R535, include_str!("symbols/libnvidia-ml-535.txt")),
    (DriverLibraryKind::Nvml, DriverVersion::R550, include_str!("symbols/libnvidia-ml-550.txt")),
];

const MAPS: [(DriverVersion, &str); 2] = [
    (DriverVersion::R535, include_str!("symbols/cuGetProcAddress-535.txt")),
    (DriverVersion::R550, include_str!("symbols/cuGetProcAddress-550.txt")),
];

fn list(text: &'static str) -> BTreeSet<&'static str> {
    text.lines().collect()
}

/// Parses a recorded map: from name and flags to the first version of each symbol, in ascending order.
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
fn exports_match_the_real_libraries() {
    for (library, driver, text) in LISTS {
        let ours: Vec<_> = exports(library, driver).collect();
        assert_eq!(ours.len(), text.lines().count(), "{library:?} {driver:?}: a name twice");
        assert_eq!(ours.into_iter().collect::<BTreeSet<_>>(), list(text), "{library:?} {driver:?}");
    }
}

#[test]
fn first_driver_of_each_name_matches_the_lists() {
    for library in DriverLibraryKind::ALL {
        let [old, new] =
            [0, 1].map(|at| list(LISTS.iter().filter(|entry| entry.0 == library).nth(at).unwrap().2));
        for name in new {
            let first = if old.contains(name) { DriverVersion::R535 } else { DriverVersion::R550 };
            assert_eq!(since(library, name), first, "{name}");
        }
    }
}

#[test]
fn per_thread_names_are_twins_of_their_base_names() {
    for name in exports(DriverLibraryKind::Cuda, DriverVersion::R550) {
        if let Some(base) = name.strip_suffix("_ptsz").or_else(|| name.strip_suffix("_ptds")) {
            assert_eq!(twin(base), Some(name));
            assert_eq!(since(DriverLibraryKind::Cuda, base), since(DriverLibraryKind::Cuda, name));
        } else if let Some(twin) = twin(name) {
            assert!(
                [format!("{name}_ptsz"), format!("{name}_ptds")].contains(&twin.to_owned()),
                "{name}: {twin}"
            );
        }
    }
}

#[test]
fn debugger_variables_are_exported() {
    let exported: BTreeSet<_> = exports(DriverLibraryKind::Cuda, DriverVersion::R535).collect();
    assert!(VARIABLES.iter().all(|(name, bytes)| exported.contains(name) && *bytes >= 4));
}

#[test]
fn every_recorded_lookup_is_reproduced() {
    for (driver, text) in MAPS {
        for ((name, flags), rows) in map(text) {
            // The driver accepts the flag of the legacy stream and ignores it.
            for flags in [flags, flags | 1] {
                let ask = |version| proc_address(driver, name, version, flags);
                let (first, _) = rows[0];
                assert_eq!(ask(first - 1), ProcAddressLookup::NewerThanAsked, "{driver:?} {name} {flags}");
                assert_eq!(ask(0), ProcAddressLookup::NewerThanAsked, "{driver:?} {name} {flags}");
                for (at, (version, symbol)) in rows.iter().enumerate() {
                    let last = rows.get(at + 1).map_or(i32::MAX, |next| next.0 - 1);
                    for version in [*version, last] {
                        assert_eq!(
                            ask(version),
                            ProcAddressLookup::Symbol(symbol),
                            "{driver:?} {name} {version} {flags}"
                        );
                    }
                }
                assert_eq!(
                    ask(-1),
                    ProcAddressLookup::Symbol(rows.last().unwrap().1),
                    "{driver:?} {name} {flags}"
                );
            }
        }
    }
}

#[test]
fn names_unknown_to_the_driver_are_not_found() {
    for (driver, text) in MAPS {
        let known = map(text);
        let names = exports(DriverLibraryKind::Cuda, DriverVersion::R550).chain([
            "",
            "cu",
            "cuNothing",
            "cuMemAlloc ",
        ]);
        for name in names {
            let ours = proc_address(driver, name, i32::MAX, 0);
            assert_eq!(
                ours == ProcAddressLookup::Unknown,
                !known.contains_key(&(name, 0)),
                "{driver:?} {name}: {ours:?}"
            );
        }
        for name in
            ["cuMemAlloc_v2", "cuMemcpy_ptds", "cuGetProcAddress_v2", "cudbgMain", "cuMemGetAttribute"]
        {
            assert_eq!(proc_address(driver, name, 12040, 0), ProcAddressLookup::Unknown, "{driver:?} {name}");
        }
        for flags in 4..10 {
            assert_eq!(proc_address(driver, "cuMemcpy", 12000, flags), ProcAddressLookup::BadFlags);
        }
    }
}

#[test]
fn lookup_result_is_always_exported() {
    for (driver, text) in MAPS {
        let exported: BTreeSet<_> = exports(DriverLibraryKind::Cuda, driver).collect();
        for (name, flags) in map(text).into_keys() {
            match proc_address(driver, name, i32::MAX, flags) {
                ProcAddressLookup::Symbol(symbol) => {
                    assert!(exported.contains(symbol), "{driver:?} {name}: {symbol}")
                }
                other => panic!("{driver:?} {name}: {other:?}"),
            }
        }
    }
}

#[test]
fn error_codes_have_names_and_descriptions() {
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
