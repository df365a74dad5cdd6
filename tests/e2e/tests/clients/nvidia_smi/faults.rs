//! The output of `nvidia-smi` when something is wrong.

use crate::client_node::ClientNode;
use partage_sim_node::state::GpuFault;

#[test]
fn unloaded_driver_prints_the_communication_error() {
    for client_node in ClientNode::one_model("T4", 1) {
        client_node.node.state().set_loaded(false);
        for arguments in [&[][..], &["-L"], &["-q"], &["topo", "-m"]] {
            let output = client_node.nvidia_smi(arguments);
            assert_eq!(output.code, Some(9), "{output:#?}");
            let sentence = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. \
                            Make sure that the latest NVIDIA driver is installed and running.";
            assert_eq!(output.out.trim(), sentence);
        }
        client_node.node.state().set_loaded(true);
        client_node.nvidia_smi(&[]).success();
    }
}

#[test]
fn gpu_off_the_bus_is_reported_as_lost() {
    for client_node in ClientNode::one_model("A100-SXM4-40GB", 2) {
        client_node.node.state().inject(1, GpuFault::Lost);
        let address = client_node.node.config().gpus[1].pci.to_string();
        let expected = format!("{}: GPU is lost.  Reboot the system to recover this GPU", &address[4..]);
        for arguments in [&[][..], &["-L"], &["-q"], &["-i", "1"]] {
            let output = client_node.nvidia_smi(arguments);
            assert_eq!(output.code, Some(15), "{output:#?}");
            assert!(output.out.contains("Unable to determine the device handle for"), "{output:#?}");
            assert!(output.out.contains(&expected), "{output:#?}");
        }
        let table = client_node.nvidia_smi(&["-i", "0"]).success();
        assert!(table.contains("|   0  NVIDIA A100-SXM4-40GB"), "the other GPU is unchanged\n{table}");
        client_node.node.state().inject(1, GpuFault::Returned);
        assert_eq!(client_node.nvidia_smi(&["-L"]).success().lines().count(), 2);
    }
}

#[test]
fn ecc_errors_are_counted() {
    for client_node in ClientNode::one_model("A100-SXM4-40GB", 2) {
        client_node.node.state().inject(1, GpuFault::CorrectedErrors(5));
        client_node.node.state().inject(1, GpuFault::UncorrectedErrors(2));
        let fields = "index,ecc.errors.corrected.volatile.total,ecc.errors.uncorrected.volatile.total,\
                      ecc.errors.corrected.aggregate.total,ecc.errors.uncorrected.aggregate.total";
        let output =
            client_node.nvidia_smi(&[&format!("--query-gpu={fields}"), "--format=csv,noheader"]).success();
        assert_eq!(output, "0, 0, 0, 0, 0\n1, 5, 2, 5, 2\n");
        let table = client_node.nvidia_smi(&["-i", "1"]).success();
        let row = table.lines().find(|line| line.starts_with("|   1  ")).unwrap();
        assert!(row.ends_with("                    2 |"), "{table}");
    }
}

#[test]
fn slow_gpu_reports_thermal_slowdown() {
    for client_node in ClientNode::one_model("A100-SXM4-40GB", 1) {
        client_node.node.state().inject(0, GpuFault::Slow(2000));
        let _workload = client_node.workload(0, 0, 100);
        let fields = "clocks_event_reasons.sw_thermal_slowdown,clocks_event_reasons.gpu_idle,temperature.gpu";
        let output =
            client_node.nvidia_smi(&[&format!("--query-gpu={fields}"), "--format=csv,noheader"]).success();
        let slowdown = client_node.node.card(0).unwrap().temperature.slowdown;
        assert_eq!(output, format!("Active, Not Active, {}\n", slowdown - 1));
    }
}
