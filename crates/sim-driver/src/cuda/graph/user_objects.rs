//! User objects, which live as long as the graphs that reference them.

use super::super::event::Event;
use super::node_operation::HostCallback;
use super::store::{UserObject, new_handle};
use super::*;

static USER_OBJECTS: HandleArena<u64> = HandleArena::new();

/// Releases the handle of a destroyed user object.
pub(super) fn release_handle(object: usize) {
    USER_OBJECTS.drop(object as *mut u8);
}

pub(super) fn create(destroy: HostCallback, references: u32) -> Result<CUuserObject, CudaError> {
    let handle = new_handle(&USER_OBJECTS)?;
    store().objects.insert(handle, UserObject { references: u64::from(references), destroy });
    Ok(handle as CUuserObject)
}

/// Adds references of a graph to a user object; with `moved`, the caller's references are transferred.
pub(super) fn retain_in(graph: GraphKey, object: usize, count: u32, moved: bool) -> Result<(), CudaError> {
    let mut store = store();
    store.graph(graph)?;
    let references = store.objects.get(&object).ok_or(CudaError::INVALID_VALUE)?.references;
    if moved && references < u64::from(count) {
        return Err(CudaError::INVALID_VALUE);
    }
    if !moved {
        store.retain(object, count)?;
    }
    if let Some(graph) = store.graphs.get_mut(&graph) {
        let held = graph.objects.entry(object).or_default();
        *held = held.saturating_add(count);
    }
    Ok(())
}

/// Releases references of a graph to a user object.
pub(super) fn release_in(graph: GraphKey, object: usize, count: u32) -> Result<(), CudaError> {
    let mut store = store();
    let held = store.graph(graph)?.objects.get(&object).copied().unwrap_or(0);
    let left = held.checked_sub(count).ok_or(CudaError::INVALID_VALUE)?;
    if let Some(graph) = store.graphs.get_mut(&graph) {
        if left == 0 {
            graph.objects.remove(&object);
        } else {
            graph.objects.insert(object, left);
        }
    }
    store.release(object, count)?;
    run_destructors(store, None);
    Ok(())
}

/// Unlocks the store and calls the pending destructors on a driver thread, as the real driver does. Waits for `after`
/// first, if given.
pub(super) fn run_destructors(mut store: MutexGuard<'_, GraphStore>, after: Option<(&'static Event, u64)>) {
    let pending = std::mem::take(&mut store.pending_destructors);
    drop(store);
    if pending.is_empty() {
        return;
    }
    let run = move || {
        if let Some((event, ticket)) = after {
            event.wait(ticket);
        }
        pending.into_iter().for_each(HostCallback::run);
    };
    // If the thread cannot be spawned, the destructors never run: better than running them inside a call of the
    // program.
    let _ = std::thread::Builder::new().name("cuda-UserObject".into()).spawn(run);
}
