//! What `nvidia-smi` says when something is wrong.

use crate::stage::Stage;
use partage_sim_node::state::Fault;

#[test]
fn without_the_driver_it_says_its_famous_sentence() {
    for stage in Stage::both("T4", 1) {
        stage.node.state().set_loaded(false);
        for arguments in [&[][..], &["-L"], &["-q"], &["topo", "-m"]] {
            let said = stage.smi(arguments);
            assert_eq!(said.code, Some(9), "{said:#?}");
            let sentence = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. \
                            Make sure that the latest NVIDIA driver is installed and running.";
            assert_eq!(said.out.trim(), sentence);
        }
        stage.node.state().set_loaded(true);
        stage.smi(&[]).well();
    }
}

#[test]
fn a_gpu_off_the_bus_is_lost() {
    for stage in Stage::both("A100-SXM4-40GB", 2) {
        stage.node.state().inject(1, Fault::Lost);
        let address = stage.node.config().gpus[1].pci.to_string();
        let words = format!("{}: GPU is lost.  Reboot the system to recover this GPU", &address[4..]);
        for arguments in [&[][..], &["-L"], &["-q"], &["-i", "1"]] {
            let said = stage.smi(arguments);
            assert_eq!(said.code, Some(15), "{said:#?}");
            assert!(said.out.contains("Unable to determine the device handle for"), "{said:#?}");
            assert!(said.out.contains(&words), "{said:#?}");
        }
        let table = stage.smi(&["-i", "0"]).well();
        assert!(table.contains("|   0  NVIDIA A100-SXM4-40GB"), "the other one is as before\n{table}");
        stage.node.state().inject(1, Fault::Returned);
        assert_eq!(stage.smi(&["-L"]).well().lines().count(), 2);
    }
}

#[test]
fn errors_of_the_memory_are_counted() {
    for stage in Stage::both("A100-SXM4-40GB", 2) {
        stage.node.state().inject(1, Fault::CorrectedErrors(5));
        stage.node.state().inject(1, Fault::UncorrectedErrors(2));
        let fields = "index,ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total,\
                      ecc.errors.corrected.aggregate.total,ecc.errors.uncorrected.aggregate.total";
        let said = stage.smi(&[&format!("--query-gpu={fields}"), "--format=csv,noheader"]).well();
        assert_eq!(said, "0, 0, 0, 0, 0\n1, 5, 2, 5, 2\n");
        let table = stage.smi(&["-i", "1"]).well();
        let row = table.lines().find(|line| line.starts_with("|   1  ")).unwrap();
        assert!(row.ends_with("                    2 |"), "{table}");
    }
}

#[test]
fn a_slow_gpu_says_that_it_is_too_warm() {
    for stage in Stage::both("A100-SXM4-40GB", 1) {
        stage.node.state().inject(0, Fault::Slow(2000));
        let _workload = stage.workload(0, 0, 100);
        let fields = "clocks_event_reasons.sw_thermal_slowdown,clocks_event_reasons.gpu_idle,temperature.gpu";
        let said = stage.smi(&[&format!("--query-gpu={fields}"), "--format=csv,noheader"]).well();
        let slowdown = stage.node.card(0).unwrap().temperature.slowdown;
        assert_eq!(said, format!("Active, Not Active, {}\n", slowdown - 1));
    }
}
