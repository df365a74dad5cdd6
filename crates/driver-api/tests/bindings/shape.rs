//! Compares function types by the sizes, alignments and names of their arguments and results.

use std::any::type_name;

/// The size, alignment and name of a type.
#[derive(Debug)]
pub(crate) struct TypeShape(usize, usize, &'static str);

impl TypeShape {
    fn of<T>() -> Self {
        Self(size_of::<T>(), align_of::<T>(), type_name::<T>())
    }

    /// Returns whether a caller with one declaration can call a function with the other. Names of primitives,
    /// pointees and mutability of pointers must agree; other types have different names on both sides.
    fn is_compatible(&self, other: &Self) -> bool {
        let (ours, theirs) = (Pointee::of(self.2), Pointee::of(other.2));
        (self.0, self.1) == (other.0, other.1)
            && ours.pointers == theirs.pointers
            && (ours.name == theirs.name || !ours.is_primitive() || !theirs.is_primitive())
    }
}

/// The type that a chain of pointers points to.
struct Pointee {
    pointers: Vec<&'static str>,
    name: &'static str,
}

impl Pointee {
    fn of(mut name: &'static str) -> Self {
        let mut pointers = Vec::new();
        while let Some((pointer, rest)) = name.strip_prefix('*').and_then(|name| name.split_once(' ')) {
            pointers.push(pointer);
            name = rest;
        }
        Self { pointers, name }
    }

    fn is_primitive(&self) -> bool {
        !self.name.contains("::") || self.name.ends_with("::c_void")
    }
}

/// The types of a function's arguments and of its result.
pub(crate) trait FunctionShape {
    fn shape() -> (Vec<TypeShape>, TypeShape);
}

pub(crate) fn shape_of<F: FunctionShape>(_: F) -> (Vec<TypeShape>, TypeShape) {
    F::shape()
}

/// The result type of a function that the other project does not declare.
pub(crate) enum MissingFunction {}

/// Returns whether two function types are compatible; `None` if the other project does not declare the function.
pub(crate) fn compare_shapes(
    ours: &(Vec<TypeShape>, TypeShape),
    theirs: &(Vec<TypeShape>, TypeShape),
) -> Option<bool> {
    if theirs.1.2 == type_name::<MissingFunction>() {
        return None;
    }
    let arguments =
        ours.0.len() == theirs.0.len() && ours.0.iter().zip(&theirs.0).all(|(a, b)| a.is_compatible(b));
    Some(arguments && ours.1.is_compatible(&theirs.1))
}

macro_rules! shapes {
    ($($arg:ident)*) => {
        impl<R, $($arg),*> FunctionShape for unsafe fn($($arg),*) -> R {
            fn shape() -> (Vec<TypeShape>, TypeShape) {
                (vec![$(TypeShape::of::<$arg>()),*], TypeShape::of::<R>())
            }
        }
        shapes! { @less $($arg)* }
    };
    (@less) => {};
    (@less $first:ident $($rest:ident)*) => { shapes! { $($rest)* } };
}

shapes! { A B C D E F G H I J K L M N O P Q S }

/// A function pointer type with inferred argument types.
macro_rules! inferred {
    ($($arg:ident)*) => { unsafe fn($(inferred!(@ $arg)),*) -> _ };
    (@ $arg:ident) => { _ };
}
pub(crate) use inferred;

#[test]
fn incompatible_signatures_are_detected() {
    let shape = |f: unsafe fn(*mut u32)| shape_of(f);
    let same: unsafe fn(*mut u32) = |_| ();
    let narrower: unsafe fn(*mut u16) = |_| ();
    let constant: unsafe fn(*const u32) = |_| ();
    let deeper: unsafe fn(*mut *mut u32) = |_| ();
    let by_value: unsafe fn(u32) = |_| ();
    assert_eq!(compare_shapes(&shape(same), &shape_of(same)), Some(true));
    assert_eq!(compare_shapes(&shape(same), &shape_of(narrower)), Some(false));
    assert_eq!(compare_shapes(&shape(same), &shape_of(constant)), Some(false));
    assert_eq!(compare_shapes(&shape(same), &shape_of(deeper)), Some(false));
    assert_eq!(compare_shapes(&shape(same), &shape_of(by_value)), Some(false));
}
