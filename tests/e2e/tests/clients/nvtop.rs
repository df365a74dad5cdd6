//! `nvtop`, which draws on a terminal.

use crate::client_node::{ClientNode, mib};
use crate::terminal::TerminalProgram;
use partage_testkit::eventually;
use partage_testkit::sim_node::WorkloadProcess;
use std::process::Command;

#[tokio::test]
async fn nvtop_draws_gpus_and_processes() {
    for client_node in ClientNode::one_model("A100-SXM4-40GB", 2) {
        let workload = client_node.workload(1, 4096, 100);
        let mut command = Command::new(client_node.clients.nvtop());
        // Use settings of its own, independent of the user's.
        let nowhere = client_node.node.path().join("home");
        command.env("HOME", &nowhere).env("XDG_CONFIG_HOME", &nowhere).env("LC_ALL", "C.UTF-8");
        let mut nvtop = TerminalProgram::start(client_node.env(&mut command));
        let screen = eventually("the process uses 100 % of GPU 1", async || {
            let screen = nvtop.text();
            assert_eq!(nvtop.exit_status(), None, "{screen}");
            let process = |line: &str| line.contains(&workload.pid().to_string()) && line.contains("100%");
            let gpu = screen.contains("|100%]") && screen.contains("\n GPU 1410MHz ");
            if gpu && screen.lines().any(process) { Ok(screen) } else { Err(screen) }
        })
        .await;
        let card = client_node.node.card(0).unwrap();
        for index in 0..2 {
            let mut lines = screen.lines().skip_while(|line| !line.starts_with(&format!(" Device {index} ")));
            let (device, figures, bars) =
                (lines.next().expect(&screen), lines.next().unwrap(), lines.next().unwrap());
            assert!(
                device.starts_with(&format!(" Device {index} [NVIDIA A100-SXM4-40GB] PCIe GEN 4@16x")),
                "{screen}"
            );
            assert!(figures.contains(" MEM 1215MHz ") && figures.contains(" FAN N/A%"), "{screen}");
            if index == 1 {
                assert!(bars.contains("|100%]") && figures.starts_with(" GPU 1410MHz "), "{screen}");
                assert!(bars.ends_with("Gi/40.000Gi]"), "{screen}");
                continue;
            }
            let idle = format!("TEMP  {}", card.temperature.idle);
            assert!(figures.starts_with(" GPU 210MHz ") && figures.contains(&idle), "{screen}");
            assert!(figures.ends_with(&format!(" POW  {} / 400 W", card.power.idle / 1000)), "{screen}");
            // It uses version 1 of the call, which counts the driver's reserved memory as used.
            let kept = card.memory.reserved as f64 / f64::from(1 << 30);
            assert!(bars.ends_with(&format!(" {kept:.3}Gi/40.000Gi]")) && bars.contains(" 0%]"), "{screen}");
        }
        let process =
            screen.lines().find(|line| line.contains(WorkloadProcess::PROCESS_NAME)).expect(&screen);
        let words: Vec<&str> = process.split_whitespace().collect();
        let (pid, memory) =
            (workload.pid().to_string(), format!("{}MiB", mib(client_node.memory_with_context(4096))));
        assert_eq!(words[0], pid, "{screen}");
        assert_eq!(words[2..6], ["1", "Compute", "100%", &memory], "{screen}");
        nvtop.press("q");
        let status = eventually("nvtop ends", async || nvtop.exit_status().ok_or("still running")).await;
        assert!(status.success(), "{status}");
    }
}
