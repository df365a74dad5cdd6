//! GPUMounter's HTTP asks: hot add and remove of whole GPUs, with the replies its scripts look for.
//!
//! Only the reading of a request is here, with the texts and codes upstream answers when it cannot be read.

use super::asks::whole_gpu;
use crate::model::{GpuUuid, MAX_GPUS_PER_CONTAINER, MemoryAsk, Namespace, PodName, WantedGpus};

/// A request that could be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// `GET /addgpu/namespace/:ns/pod/:pod/gpu/:n[/isEntireMount/:b]`
    Add(Add),
    /// `POST /removegpu/namespace/:ns/pod/:pod/force/:b` with the field `uuids`
    Remove(Remove),
}

/// Whole GPUs wanted by a running pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Add {
    /// The pod's namespace.
    pub namespace: Namespace,
    /// The pod.
    pub pod: PodName,
    /// How many GPUs, 1 to 64.
    pub count: u32,
    /// All in one reservation, given back only together.
    pub entire: bool,
}

/// GPUs to take back from a running pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remove {
    /// The pod's namespace.
    pub namespace: Namespace,
    /// The pod.
    pub pod: PodName,
    /// Which, as written: at least one, possibly repeated.
    pub uuids: Vec<GpuUuid>,
    /// Even while processes use them.
    pub force: bool,
}

/// The answer to a request that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {}", body.trim_end())]
pub struct Refusal {
    /// The HTTP status.
    pub status: u16,
    /// The body, plain text ending in a new line.
    pub body: String,
}

impl Refusal {
    fn new(status: u16, text: impl Into<String>) -> Refusal {
        Refusal { status, body: text.into() + "\n" }
    }
}

impl Add {
    /// The same ask in the model: whole GPUs with all they have.
    pub fn want(&self) -> WantedGpus {
        WantedGpus { count: self.count, part: whole_gpu(MemoryAsk::All) }
    }
}

/// Reads a request from its method, its decoded path and its `uuids` fields.
pub fn read(method: &str, path: &str, uuids: &[&str]) -> Result<Request, Refusal> {
    // Upstream redirects a trailing slash to the path without it.
    let path = path.strip_suffix('/').unwrap_or(path);
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    if segments.iter().any(|segment| segment.is_empty()) {
        return Err(Refusal::new(404, "404 page not found"));
    }
    let (wanted_method, request) = match segments[..] {
        ["addgpu", "namespace", namespace, "pod", pod, "gpu", count] => {
            ("GET", add(namespace, pod, count, "false"))
        }
        ["addgpu", "namespace", namespace, "pod", pod, "gpu", count, "isEntireMount", entire] => {
            ("GET", add(namespace, pod, count, entire))
        }
        ["removegpu", "namespace", namespace, "pod", pod, "force", force] => {
            ("POST", remove(namespace, pod, uuids, force))
        }
        _ => return Err(Refusal::new(404, "404 page not found")),
    };
    if method != wanted_method {
        return Err(Refusal::new(405, "Method Not Allowed"));
    }
    request
}

fn add(namespace: &str, pod: &str, count: &str, entire: &str) -> Result<Request, Refusal> {
    // The order of the checks is upstream's.
    let asked: i32 =
        count.parse().map_err(|_| Refusal::new(400, format!("Invalid param gpuNum: {count}")))?;
    let entire = boolean(entire).ok_or_else(|| {
        Refusal::new(400, format!("Invalid param isEntireMount: {entire}(should be true or false)"))
    })?;
    match u32::try_from(asked) {
        Ok(count @ 1..=MAX_GPUS_PER_CONTAINER) => {
            Ok(Request::Add(Add { namespace: namespace.into(), pod: pod.into(), count, entire }))
        }
        Ok(1..) => Err(Refusal::new(
            400,
            format!("Invalid param gpuNum: {count}(ask for {MAX_GPUS_PER_CONTAINER} GPUs or fewer)"),
        )),
        // Upstream answers success and mounts nothing, or loses its worker.
        _ => Err(Refusal::new(400, format!("Invalid param gpuNum: {count}(ask for 1 GPU or more)"))),
    }
}

fn remove(namespace: &str, pod: &str, uuids: &[&str], force: &str) -> Result<Request, Refusal> {
    if uuids.is_empty() {
        return Err(Refusal::new(400, "Invalid parameter"));
    }
    let force = boolean(force).ok_or_else(|| {
        Refusal::new(400, format!("Invalid parameter force: {force}(should be true or false)"))
    })?;
    let uuids = uuids.iter().copied().map(GpuUuid::from).collect();
    Ok(Request::Remove(Remove { namespace: namespace.into(), pod: pod.into(), uuids, force }))
}

/// The spellings GPUMounter's clients may use.
fn boolean(text: &str) -> Option<bool> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn get(path: &str) -> Result<Request, Refusal> {
        read("GET", path, &[])
    }

    fn refused(request: Result<Request, Refusal>) -> (u16, String) {
        let refusal = request.unwrap_err();
        (refusal.status, refusal.body)
    }

    #[test]
    fn g2_count_that_is_no_number() {
        let answer = refused(get("/addgpu/namespace/default/pod/p/gpu/abc/isEntireMount/false"));
        assert_eq!(answer, (400, "Invalid param gpuNum: abc\n".into()));
        // Beyond 32 bits, and before the other parameter is looked at.
        let answer = refused(get("/addgpu/namespace/default/pod/p/gpu/2147483648/isEntireMount/maybe"));
        assert_eq!(answer, (400, "Invalid param gpuNum: 2147483648\n".into()));
    }

    #[test]
    fn g3_entire_that_is_no_boolean() {
        let answer = refused(get("/addgpu/namespace/default/pod/p/gpu/1/isEntireMount/maybe"));
        assert_eq!(answer, (400, "Invalid param isEntireMount: maybe(should be true or false)\n".into()));
    }

    #[test]
    fn g5_remove_without_uuids() {
        // Checked before force.
        let answer = refused(read("POST", "/removegpu/namespace/default/pod/p/force/2", &[]));
        assert_eq!(answer, (400, "Invalid parameter\n".into()));
    }

    #[test]
    fn g6_force_that_is_no_boolean() {
        let answer = refused(read("POST", "/removegpu/namespace/default/pod/p/force/2", &["GPU-a"]));
        assert_eq!(answer, (400, "Invalid parameter force: 2(should be true or false)\n".into()));
    }

    #[test]
    fn g17_add_without_entire_means_false() {
        let Ok(Request::Add(add)) = get("/addgpu/namespace/default/pod/p/gpu/4") else { panic!() };
        assert_eq!((add.count, add.entire), (4, false));
        let want = add.want();
        assert_eq!((want.count, want.part), (4, whole_gpu(MemoryAsk::All)));
    }

    #[test]
    fn g18_no_gpu_or_less_is_refused() {
        for count in ["0", "-1"] {
            let answer = refused(get(&format!("/addgpu/namespace/default/pod/p/gpu/{count}")));
            assert_eq!(answer, (400, format!("Invalid param gpuNum: {count}(ask for 1 GPU or more)\n")));
        }
    }

    #[test]
    fn more_gpus_than_a_container_can_have_are_refused() {
        let answer = refused(get("/addgpu/namespace/default/pod/p/gpu/17"));
        assert_eq!(answer, (400, "Invalid param gpuNum: 17(ask for 16 GPUs or fewer)\n".into()));
        assert!(get("/addgpu/namespace/default/pod/p/gpu/16").is_ok());
    }

    #[test]
    fn reads_add_and_remove() {
        let Ok(Request::Add(add)) = get("/addgpu/namespace/ns/pod/p/gpu/2/isEntireMount/T/") else {
            panic!()
        };
        assert_eq!((add.namespace.as_str(), add.pod.as_str(), add.entire), ("ns", "p", true));
        let request = read("POST", "/removegpu/namespace/ns/pod/p/force/1", &["GPU-a", "GPU-b"]);
        let Ok(Request::Remove(remove)) = request else { panic!() };
        assert_eq!((remove.uuids.len(), remove.force), (2, true));
    }

    #[test]
    fn other_paths_and_methods_are_not_ours() {
        assert_eq!(refused(get("/addgpu/namespace//pod/p/gpu/1")).0, 404);
        assert_eq!(refused(get("/nothing")).0, 404);
        assert_eq!(refused(get("")).0, 404);
        assert_eq!(refused(read("POST", "/addgpu/namespace/ns/pod/p/gpu/1", &[])).0, 405);
    }

    proptest! {
        #[test]
        fn never_panics_and_never_adds_nothing(path in "(/(addgpu|namespace|pod|gpu|[a-z0-9-]{0,4})){0,9}") {
            if let Ok(Request::Add(add)) = get(&path) {
                prop_assert!(add.count >= 1);
            }
        }
    }
}
