//! GPUMounter's HTTP requests, which add whole GPUs to running pods and remove them.
//!
//! This module parses requests. Invalid requests get upstream's status codes and texts, which its scripts expect.

use super::asks::whole_gpu;
use crate::model::{GpuUuid, MAX_GPUS_PER_CONTAINER, MemoryAsk, Namespace, PodName, WantedGpus};

/// A valid request of a GPUMounter client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuMounterRequest {
    /// Adds GPUs: `GET /addgpu/namespace/:ns/pod/:pod/gpu/:n[/isEntireMount/:b]`
    Add(AddGpuRequest),
    /// Removes GPUs: `POST /removegpu/namespace/:ns/pod/:pod/force/:b` with the field `uuids`
    Remove(RemoveGpuRequest),
}

/// A request for whole GPUs for a running pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddGpuRequest {
    /// Namespace of the pod.
    pub namespace: Namespace,
    /// Name of the pod.
    pub pod: PodName,
    /// Number of GPUs, from 1 to [`MAX_GPUS_PER_CONTAINER`].
    pub count: u32,
    /// Whether the GPUs are one reservation, which is released as a whole.
    pub entire: bool,
}

/// A request to remove GPUs from a running pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoveGpuRequest {
    /// Namespace of the pod.
    pub namespace: Namespace,
    /// Name of the pod.
    pub pod: PodName,
    /// UUIDs as written: at least one, possibly with duplicates.
    pub uuids: Vec<GpuUuid>,
    /// Whether to remove GPUs that processes are using.
    pub force: bool,
}

/// The HTTP response to an invalid request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {}", body.trim_end())]
pub struct GpuMounterError {
    /// HTTP status code of the response.
    pub status: u16,
    /// Body as plain text, ending with a newline.
    pub body: String,
}

impl GpuMounterError {
    fn new(status: u16, text: impl Into<String>) -> GpuMounterError {
        GpuMounterError { status, body: text.into() + "\n" }
    }
}

impl AddGpuRequest {
    /// Converts the request to whole GPUs with all of their memory.
    pub fn want(&self) -> WantedGpus {
        WantedGpus { count: self.count, share: whole_gpu(MemoryAsk::All) }
    }
}

/// Parses a request from its method, its decoded path and its `uuids` fields.
pub fn read(method: &str, path: &str, uuids: &[&str]) -> Result<GpuMounterRequest, GpuMounterError> {
    // Upstream redirects a trailing slash to the path without it.
    let path = path.strip_suffix('/').unwrap_or(path);
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    if segments.iter().any(|segment| segment.is_empty()) {
        return Err(GpuMounterError::new(404, "404 page not found"));
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
        _ => return Err(GpuMounterError::new(404, "404 page not found")),
    };
    if method != wanted_method {
        return Err(GpuMounterError::new(405, "Method Not Allowed"));
    }
    request
}

fn add(namespace: &str, pod: &str, count: &str, entire: &str) -> Result<GpuMounterRequest, GpuMounterError> {
    // The checks are in the same order as upstream.
    let number: i32 =
        count.parse().map_err(|_| GpuMounterError::new(400, format!("Invalid param gpuNum: {count}")))?;
    let entire = boolean(entire).ok_or_else(|| {
        GpuMounterError::new(400, format!("Invalid param isEntireMount: {entire}(should be true or false)"))
    })?;
    match u32::try_from(number) {
        Ok(count @ 1..=MAX_GPUS_PER_CONTAINER) => Ok(GpuMounterRequest::Add(AddGpuRequest {
            namespace: namespace.into(),
            pod: pod.into(),
            count,
            entire,
        })),
        Ok(1..) => Err(GpuMounterError::new(
            400,
            format!("Invalid param gpuNum: {count}(should be at most {MAX_GPUS_PER_CONTAINER})"),
        )),
        // Upstream reports success and mounts nothing, or its worker crashes.
        _ => Err(GpuMounterError::new(400, format!("Invalid param gpuNum: {count}(should be at least 1)"))),
    }
}

fn remove(
    namespace: &str,
    pod: &str,
    uuids: &[&str],
    force: &str,
) -> Result<GpuMounterRequest, GpuMounterError> {
    if uuids.is_empty() {
        return Err(GpuMounterError::new(400, "Invalid parameter"));
    }
    let force = boolean(force).ok_or_else(|| {
        GpuMounterError::new(400, format!("Invalid parameter force: {force}(should be true or false)"))
    })?;
    let uuids = uuids.iter().copied().map(GpuUuid::from).collect();
    Ok(GpuMounterRequest::Remove(RemoveGpuRequest {
        namespace: namespace.into(),
        pod: pod.into(),
        uuids,
        force,
    }))
}

/// Parses a boolean in all forms that GPUMounter accepts.
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

    fn get(path: &str) -> Result<GpuMounterRequest, GpuMounterError> {
        read("GET", path, &[])
    }

    fn refused(request: Result<GpuMounterRequest, GpuMounterError>) -> (u16, String) {
        let error = request.unwrap_err();
        (error.status, error.body)
    }

    #[test]
    fn g2_invalid_count_is_refused() {
        let answer = refused(get("/addgpu/namespace/default/pod/p/gpu/abc/isEntireMount/false"));
        assert_eq!(answer, (400, "Invalid param gpuNum: abc\n".into()));
        // The count exceeds 32 bits and is checked before the other parameter.
        let answer = refused(get("/addgpu/namespace/default/pod/p/gpu/2147483648/isEntireMount/maybe"));
        assert_eq!(answer, (400, "Invalid param gpuNum: 2147483648\n".into()));
    }

    #[test]
    fn g3_invalid_entire_mount_is_refused() {
        let answer = refused(get("/addgpu/namespace/default/pod/p/gpu/1/isEntireMount/maybe"));
        assert_eq!(answer, (400, "Invalid param isEntireMount: maybe(should be true or false)\n".into()));
    }

    #[test]
    fn g5_remove_without_uuids_is_refused() {
        // UUIDs are checked before `force`.
        let answer = refused(read("POST", "/removegpu/namespace/default/pod/p/force/2", &[]));
        assert_eq!(answer, (400, "Invalid parameter\n".into()));
    }

    #[test]
    fn g6_invalid_force_is_refused() {
        let answer = refused(read("POST", "/removegpu/namespace/default/pod/p/force/2", &["GPU-a"]));
        assert_eq!(answer, (400, "Invalid parameter force: 2(should be true or false)\n".into()));
    }

    #[test]
    fn g17_add_without_entire_means_false() {
        let Ok(GpuMounterRequest::Add(add)) = get("/addgpu/namespace/default/pod/p/gpu/4") else { panic!() };
        assert_eq!((add.count, add.entire), (4, false));
        let want = add.want();
        assert_eq!((want.count, want.share), (4, whole_gpu(MemoryAsk::All)));
    }

    #[test]
    fn g18_count_below_one_is_refused() {
        for count in ["0", "-1"] {
            let answer = refused(get(&format!("/addgpu/namespace/default/pod/p/gpu/{count}")));
            assert_eq!(answer, (400, format!("Invalid param gpuNum: {count}(should be at least 1)\n")));
        }
    }

    #[test]
    fn count_above_the_maximum_is_refused() {
        let answer = refused(get("/addgpu/namespace/default/pod/p/gpu/17"));
        assert_eq!(answer, (400, "Invalid param gpuNum: 17(should be at most 16)\n".into()));
        assert!(get("/addgpu/namespace/default/pod/p/gpu/16").is_ok());
    }

    #[test]
    fn add_and_remove_are_parsed() {
        let Ok(GpuMounterRequest::Add(add)) = get("/addgpu/namespace/ns/pod/p/gpu/2/isEntireMount/T/") else {
            panic!()
        };
        assert_eq!((add.namespace.as_str(), add.pod.as_str(), add.entire), ("ns", "p", true));
        let request = read("POST", "/removegpu/namespace/ns/pod/p/force/1", &["GPU-a", "GPU-b"]);
        let Ok(GpuMounterRequest::Remove(remove)) = request else { panic!() };
        assert_eq!((remove.uuids.len(), remove.force), (2, true));
    }

    #[test]
    fn other_paths_and_methods_are_refused() {
        assert_eq!(refused(get("/addgpu/namespace//pod/p/gpu/1")).0, 404);
        assert_eq!(refused(get("/nothing")).0, 404);
        assert_eq!(refused(get("")).0, 404);
        assert_eq!(refused(read("POST", "/addgpu/namespace/ns/pod/p/gpu/1", &[])).0, 405);
    }

    proptest! {
        #[test]
        fn any_path_is_parsed_without_panic_and_adds_at_least_one_gpu(path in "(/(addgpu|namespace|pod|gpu|[a-z0-9-]{0,4})){0,9}") {
            if let Ok(GpuMounterRequest::Add(add)) = get(&path) {
                prop_assert!(add.count >= 1);
            }
        }
    }
}
