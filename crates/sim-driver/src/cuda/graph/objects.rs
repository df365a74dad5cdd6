//! Objects of the program that live as long as the graphs that use them.

use super::super::event::Event;
use super::book::{Object, new_handle};
use super::work::Call;
use super::*;

static OBJECTS: Arena<u64> = Arena::new();

/// The handle means nothing any more.
pub(super) fn let_go(object: usize) {
    OBJECTS.drop(object as *mut u8);
}

pub(super) fn create(destroy: Call, references: u32) -> Result<CUuserObject, CudaError> {
    let handle = new_handle(&OBJECTS)?;
    book().objects.insert(handle, Object { references: u64::from(references), destroy });
    Ok(handle as CUuserObject)
}

/// A graph's holds on an object grow; those of the caller become its own if `moved`.
pub(super) fn retain_in(graph: GraphKey, object: usize, count: u32, moved: bool) -> Result<(), CudaError> {
    let mut book = book();
    book.graph(graph)?;
    let references = book.objects.get(&object).ok_or(CudaError::INVALID_VALUE)?.references;
    if moved && references < u64::from(count) {
        return Err(CudaError::INVALID_VALUE);
    }
    if !moved {
        book.retain(object, count)?;
    }
    if let Some(graph) = book.graphs.get_mut(&graph) {
        let held = graph.objects.entry(object).or_default();
        *held = held.saturating_add(count);
    }
    Ok(())
}

/// They shrink.
pub(super) fn release_in(graph: GraphKey, object: usize, count: u32) -> Result<(), CudaError> {
    let mut book = book();
    let held = book.graph(graph)?.objects.get(&object).copied().unwrap_or(0);
    let left = held.checked_sub(count).ok_or(CudaError::INVALID_VALUE)?;
    if let Some(graph) = book.graphs.get_mut(&graph) {
        if left == 0 {
            graph.objects.remove(&object);
        } else {
            graph.objects.insert(object, left);
        }
    }
    book.release(object, count)?;
    finish(book, None);
    Ok(())
}

/// Lets go of the book and destroys what nobody holds any more, on a thread of the driver's own as the driver does: once
/// `after` is over, if that is given.
pub(super) fn finish(mut book: MutexGuard<'_, Book>, after: Option<(&'static Event, u64)>) {
    let due = std::mem::take(&mut book.due);
    drop(book);
    if due.is_empty() {
        return;
    }
    let run = move || {
        if let Some((event, ticket)) = after {
            event.wait(ticket);
        }
        due.into_iter().for_each(Call::run);
    };
    // Without a thread they are never destroyed, which is better than in the middle of the program's call.
    let _ = std::thread::Builder::new().name("cuda-UserObject".into()).spawn(run);
}
