//! `nvtop`, which draws on a terminal.

use crate::screen::OnScreen;
use crate::stage::{Stage, mib};
use partage_testkit::eventually;
use partage_testkit::sim_node::Workload;
use std::process::Command;

#[tokio::test]
async fn nvtop_draws_gpus_and_processes() {
    for stage in Stage::both("A100-SXM4-40GB", 2) {
        let workload = stage.workload(1, 4096, 100);
        let mut command = Command::new(stage.clients.nvtop());
        // Its settings are its own, whatever the person at this machine has set.
        let nowhere = stage.node.path().join("home");
        command.env("HOME", &nowhere).env("XDG_CONFIG_HOME", &nowhere).env("LC_ALL", "C.UTF-8");
        let mut nvtop = OnScreen::start(stage.env(&mut command));
        let screen = eventually("the process uses all of GPU 1", async || {
            let screen = nvtop.text();
            assert_eq!(nvtop.ended(), None, "{screen}");
            let process = |line: &str| line.contains(&workload.pid().to_string()) && line.contains("100%");
            let gpu = screen.contains("|100%]") && screen.contains("\n GPU 1410MHz ");
            if gpu && screen.lines().any(process) { Ok(screen) } else { Err(screen) }
        })
        .await;
        let card = stage.node.card(0).unwrap();
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
            // It asks the old way, which counts what the driver keeps for itself.
            let kept = card.memory.reserved as f64 / f64::from(1 << 30);
            assert!(bars.ends_with(&format!(" {kept:.3}Gi/40.000Gi]")) && bars.contains(" 0%]"), "{screen}");
        }
        let process = screen.lines().find(|line| line.contains(Workload::NAME)).expect(&screen);
        let words: Vec<&str> = process.split_whitespace().collect();
        let (pid, memory) = (workload.pid().to_string(), format!("{}MiB", mib(stage.held(4096))));
        assert_eq!(words[0], pid, "{screen}");
        assert_eq!(words[2..6], ["1", "Compute", "100%", &memory], "{screen}");
        nvtop.press("q");
        let status = eventually("nvtop ends", async || nvtop.ended().ok_or("it runs")).await;
        assert!(status.success(), "{status}");
    }
}
