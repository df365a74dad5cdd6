//! Containers that were started with a shim and a region of layout 1 or 2 continue under this release: with that shim
//! loaded, its region mapped, and a daemon of this release.

use super::*;
use container::true_usage;
use driver::cuda::*;
use flate2::read::GzDecoder;
use partage_region::{RegionHandle, RegionOwner, UsageReader};
use partage_shim::install::{self, StandInPaths};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr::null_mut;
use std::sync::{Arc, LazyLock};

#[path = "../../../region/tests/support/layout_1.rs"]
mod layout_1;

const MIB: u64 = 1 << 20;
/// Bytes that a context takes of the simulated GPU.
const CONTEXT_BYTES: u64 = 414 * MIB;

/// The shim of the last release with layout 1, as a file.
static OLD_SHIM: LazyLock<(tempfile::TempDir, PathBuf)> =
    LazyLock::new(|| unpacked(include_bytes!("../fixtures/layout-1/libpartage_shim.so.gz")));

/// A shim of layout 2, as a file.
static LAYOUT_2_SHIM: LazyLock<(tempfile::TempDir, PathBuf)> =
    LazyLock::new(|| unpacked(include_bytes!("../fixtures/layout-2/libpartage_shim.so.gz")));

fn unpacked(packed: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libpartage_shim.so");
    std::io::copy(&mut GzDecoder::new(packed), &mut fs::File::create(&path).unwrap()).unwrap();
    (folder, path)
}

/// The region of layout 2 that no process has used.
const LAYOUT_2_REGION: [&[u8]; 2] = [
    include_bytes!("../../../region/tests/fixtures/layout-2/fresh/limits.prefix"),
    include_bytes!("../../../region/tests/fixtures/layout-2/fresh/usage.prefix"),
];

/// The shim that a container was started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShimRelease {
    Old,
    New,
}

/// A container whose region that release wrote: 2 GiB and 30 % of the node's GPU.
struct OldContainer<'a> {
    node: &'a TestNode,
    folder: tempfile::TempDir,
}

impl<'a> OldContainer<'a> {
    fn new(node: &'a TestNode) -> Self {
        Self::with_files(node, layout_1::FRESH, &OLD_SHIM.1)
    }

    fn of_layout_2(node: &'a TestNode) -> Self {
        Self::with_files(node, LAYOUT_2_REGION, &LAYOUT_2_SHIM.1)
    }

    fn with_files(node: &'a TestNode, region: [&[u8]; 2], old_shim: &Path) -> Self {
        let container = Self { node, folder: tempfile::tempdir().unwrap() };
        fs::create_dir(container.region()).unwrap();
        layout_1::put(region, &container.region());
        layout_1::set_uuid(&container.region(), 0, node.0.config().gpus[0].uuid_bytes());
        for (shim, object) in [
            (ShimRelease::Old, old_shim.to_path_buf()),
            (ShimRelease::New, install::shared_object().unwrap()),
        ] {
            fs::create_dir(container.libraries(shim)).unwrap();
            let settings = StandInPaths {
                region: &container.region(),
                real_cuda: &node.0.libraries().join("libcuda.so.1"),
                real_nvml: &node.0.libraries().join("libnvidia-ml.so.1"),
                version: None,
            };
            install::write_stand_ins(&object, &container.libraries(shim), &settings).unwrap();
        }
        container
    }

    fn region(&self) -> PathBuf {
        self.folder.path().join("region")
    }

    fn libraries(&self, shim: ShimRelease) -> PathBuf {
        self.folder.path().join(format!("{shim:?}"))
    }

    fn command(&self, shim: ShimRelease, role: &str) -> Command {
        let mut command = self.node.command(role);
        command.env("LD_LIBRARY_PATH", self.libraries(shim));
        command
    }

    /// Returns its share as in the daemon's records, with other amounts of memory and compute.
    fn share(&self, memory: u64, percent: u32) -> GpuShare {
        GpuShare { memory, context: CONTEXT_BYTES, ..share(self.node, percent, percent) }
    }

    /// Adopts the region as a daemon of this release.
    fn adopt(&self, share: GpuShare) -> Arc<RegionHandle> {
        let user = fs::metadata(self.region()).unwrap().uid();
        Arc::new(RegionHandle::adopt(&self.region(), &[share], user).unwrap())
    }

    fn start_working(&self, shim: ShimRelease, role: &str) -> RoleProcess {
        let mut process = RoleProcess::spawn(self.command(shim, role));
        process.wait_for_line("ready");
        process
    }
}

/// A program that allocates on request: see [`account`].
struct AccountProgram {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl AccountProgram {
    fn start(container: &OldContainer<'_>, shim: ShimRelease) -> Self {
        let mut command = container.command(shim, "account");
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut program = Self { child, input, output };
        assert_eq!(program.answer(), "ready");
        program
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 {
            if let Some(answer) = line.trim().strip_prefix("= ") {
                return answer.to_string();
            }
            line.clear();
        }
        panic!("the program has ended");
    }

    fn ask(&mut self, order: &str) -> String {
        writeln!(self.input.as_mut().unwrap(), "{order}").unwrap();
        self.answer()
    }

    /// Lets it exit normally.
    fn end(mut self) {
        drop(self.input.take());
        assert!(self.child.wait().unwrap().success());
    }

    /// Requests an allocation and returns its error code.
    fn allocate(&mut self, mib: u64) -> CUresult {
        self.ask(&format!("allocate {mib}")).parse().unwrap()
    }

    /// Returns the GPU's memory as the program sees it, in MiB.
    fn total(&mut self) -> u64 {
        self.ask("total").parse().unwrap()
    }
}

impl Drop for AccountProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The role of [`AccountProgram`]: every line is a request, and has a reply.
pub fn account() {
    let cuda = CudaLibrary::started();
    let (mut context, mut held) = (null_mut(), Vec::new());
    // SAFETY: the pointer is to a local variable.
    assert_eq!(unsafe { cuda.cuCtxCreate_v2(&mut context, 0, 0) }, CUDA_SUCCESS);
    node::print_line("= ready");
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let answer = match line.split_once(' ').unwrap_or((&line, "")) {
            ("allocate", mib) => {
                let (mut pointer, bytes) = (0, mib.parse::<usize>().unwrap() << 20);
                // SAFETY: the pointer is to a local variable.
                let code = unsafe { cuda.cuMemAlloc_v2(&mut pointer, bytes) };
                held.extend((code == CUDA_SUCCESS).then_some(pointer));
                u64::from(code)
            }
            // SAFETY: the pointer was allocated here and not freed yet.
            ("free", _) => u64::from(unsafe { cuda.cuMemFree_v2(held.pop().unwrap()) }),
            ("total", _) => {
                let (mut free, mut total) = (0, 0);
                // SAFETY: the pointers are to local variables.
                assert_eq!(unsafe { cuda.cuMemGetInfo_v2(&mut free, &mut total) }, CUDA_SUCCESS);
                total as u64 >> 20
            }
            other => panic!("{other:?}"),
        };
        node::print_line(&format!("= {answer}"));
    }
}

#[test]
fn old_shim_is_held_by_a_daemon_that_adopts_its_region() {
    let node = exclusive_node();
    let (container, state) = (OldContainer::new(&node), node.state());
    let mut program = AccountProgram::start(&container, ShimRelease::Old);
    assert_eq!((program.total(), program.allocate(1024)), (2048, CUDA_SUCCESS));
    let used = |handle: &RegionHandle| {
        let snapshot = handle.reader().snapshot().unwrap();
        assert_eq!(snapshot.forged, []);
        snapshot.gpus[0].used
    };
    let handle = container.adopt(container.share(2048 * MIB, 30));
    assert_eq!(handle.owner().layout(), 1);
    assert_eq!(used(&handle), CONTEXT_BYTES + 1024 * MIB);
    assert_eq!(used(&handle), true_usage(&state, 0), "according to the driver, too");
    let processes = handle.reader().snapshot().unwrap().processes;
    assert_eq!(processes.iter().map(|one| one.pid_here).collect::<Vec<_>>(), [Some(program.child.id())]);
    assert_eq!(program.allocate(1024), CUDA_ERROR_OUT_OF_MEMORY);
    // A larger limit.
    assert!(handle.apply(&[container.share(3072 * MIB, 30)]).unwrap());
    assert_eq!((program.total(), program.allocate(1024)), (3072, CUDA_SUCCESS));
    assert_eq!(used(&handle), true_usage(&state, 0));
    // The daemon is replaced, and the limit is smaller.
    drop(handle);
    let handle = container.adopt(container.share(2560 * MIB, 20));
    assert_eq!((program.total(), program.allocate(256)), (2560, CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!((program.ask("free").as_str(), program.allocate(512)), ("0", CUDA_SUCCESS));
    assert_eq!(
        (used(&handle), true_usage(&state, 0)),
        (CONTEXT_BYTES + 1536 * MIB, CONTEXT_BYTES + 1536 * MIB)
    );
    assert_eq!(handle.reader().snapshot().unwrap().gpus[0].refusals, 2);
    // Killed: what it held is counted as a dead process's, and the next process gets all of it.
    drop(program);
    let seen = handle.reader().snapshot().unwrap().gpus[0];
    assert_eq!((seen.used, seen.dead), (0, CONTEXT_BYTES + 1536 * MIB));
    let mut program = AccountProgram::start(&container, ShimRelease::Old);
    assert_eq!(program.allocate(2560 - 414), CUDA_SUCCESS);
    // Freed: it is released at once. Exited: nothing of it is in use any more.
    assert_eq!((program.ask("free").as_str(), used(&handle)), ("0", CONTEXT_BYTES));
    program.end();
    assert_eq!((used(&handle), true_usage(&state, 0)), (0, 0));
    assert_eq!(AccountProgram::start(&container, ShimRelease::Old).allocate(2560 - 414), CUDA_SUCCESS);
}

#[test]
fn old_and_new_shim_share_one_limit() {
    let node = exclusive_node();
    let container = OldContainer::new(&node);
    let handle = container.adopt(container.share(2048 * MIB, 30));
    let (mut old, mut new) = (
        AccountProgram::start(&container, ShimRelease::Old),
        AccountProgram::start(&container, ShimRelease::New),
    );
    assert_eq!((old.total(), new.total()), (2048, 2048));
    // 1220 MiB are left beside two contexts.
    assert_eq!((old.allocate(700), new.allocate(600)), (CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!((new.allocate(500), old.allocate(100)), (CUDA_SUCCESS, CUDA_ERROR_OUT_OF_MEMORY));
    assert_eq!(handle.reader().snapshot().unwrap().gpus[0].used, 2 * CONTEXT_BYTES + 1200 * MIB);
    // Each reclaims what the other held.
    drop(old);
    assert_eq!(new.allocate(1000), CUDA_SUCCESS);
    drop(new);
    assert_eq!(AccountProgram::start(&container, ShimRelease::Old).allocate(1600), CUDA_SUCCESS);
}

#[test]
fn old_shim_limits_its_own_rate_beside_a_container_of_this_release() {
    let node = exclusive_node();
    let (old, new) = (OldContainer::new(&node), container_with_share(&node, 60, 60));
    // It runs while the daemon is replaced.
    let process = old.start_working(ShimRelease::Old, "work kernel 500");
    let handle = old.adopt(old.share(2048 * MIB, 30));
    let arbiter = start_arbiter(&[&new]);
    arbiter.add(Arc::clone(&handle)).unwrap();
    let other = start_working(&new, "work kernel 500");
    let bounds = [(20.0, 36.0, "30 %, of the old release"), (40.0, 66.0, "60 %")];
    assert_shares(&node, &[&process, &other], 1500, &bounds);
    // It has no markers, so it gets no turns: its shim charges it.
    let seen = handle.reader().snapshot().unwrap().gpus[0];
    assert!(seen.spent > 0 && seen.throttled > 0, "{seen:?}");
    assert_eq!(handle.owner().limits(0).unwrap().charged(), 0);
    // Less, and more: in hundredths of a percent, which is the unit that its shim reads.
    for (percent, bounds) in [(10, (5.0, 15.0, "10 %")), (35, (20.0, 41.0, "35 %"))] {
        assert!(handle.apply(&[old.share(2048 * MIB, percent)]).unwrap());
        arbiter.limits_changed();
        std::thread::sleep(Duration::from_millis(300));
        assert_shares(&node, &[&process], 1500, &[bounds]);
    }
    // Without a daemon, nothing changes for it.
    arbiter.stop();
    std::thread::sleep(Duration::from_millis(400));
    assert_shares(&node, &[&process], 1500, &[(20.0, 41.0, "35 %, without a daemon")]);
}

/// A container that restarts after an upgrade has this release's shim, and its region still has layout 1.
#[test]
fn new_shim_reads_layout_1_in_its_own_unit() {
    let node = exclusive_node();
    let container = OldContainer::new(&node);
    let process = container.start_working(ShimRelease::New, "work kernel 500");
    // Its share is in the unit of layout 1, and no daemon can read its markers: the shim itself computes with both.
    assert_shares(&node, &[&process], 1500, &[(15.0, 36.0, "30 %, without a daemon")]);
    let handle = container.adopt(container.share(2048 * MIB, 30));
    let arbiter = Arbiter::new();
    arbiter.add(Arc::clone(&handle)).unwrap();
    assert_shares(&node, &[&process], 1500, &[(15.0, 36.0, "30 %, with a daemon")]);
    assert_eq!(RegionOwner::open(&container.region()).unwrap().layout(), 1);
    assert_eq!(UsageReader::open(&container.region()).unwrap().snapshot().unwrap().forged, []);
}

#[test]
fn shim_of_layout_2_keeps_its_share_under_this_daemon() {
    let node = exclusive_node();
    let container = OldContainer::of_layout_2(&node);
    let process = container.start_working(ShimRelease::Old, "work kernel 500");
    let handle = container.adopt(container.share(2048 * MIB, 30));
    assert_eq!(handle.owner().layout(), 2);
    let arbiter = Arbiter::new();
    arbiter.add(Arc::clone(&handle)).unwrap();
    std::thread::sleep(Duration::from_millis(400));
    assert_shares(&node, &[&process], 1500, &[(15.0, 36.0, "30 %, by its own account")]);
    assert!(handle.apply(&[container.share(2048 * MIB, 10)]).unwrap());
    std::thread::sleep(Duration::from_millis(300));
    assert_shares(&node, &[&process], 1500, &[(5.0, 15.0, "10 %, resized while it runs")]);
    let seen = handle.reader().snapshot().unwrap();
    assert!(seen.forged.is_empty() && seen.gpus[0].used > 0, "{seen:?}");
}
