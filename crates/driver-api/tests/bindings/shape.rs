//! What can be told of a function's type from outside: the sizes, alignments and names of its arguments and
//! result.

use std::any::type_name;

/// Size, alignment and name of a type.
#[derive(Debug)]
pub(crate) struct Form(usize, usize, &'static str);

impl Form {
    fn of<T>() -> Self {
        Self(size_of::<T>(), align_of::<T>(), type_name::<T>())
    }

    /// Whether a caller that knows one can call a function that has the other. Names of primitives must
    /// agree, and so must what pointers point to and whether they may write; each side has its own names for
    /// the rest.
    fn agrees(&self, other: &Self) -> bool {
        let (ours, theirs) = (Pointee::of(self.2), Pointee::of(other.2));
        (self.0, self.1) == (other.0, other.1)
            && ours.pointers == theirs.pointers
            && (ours.name == theirs.name || !ours.primitive() || !theirs.primitive())
    }
}

/// The name of a type behind its pointers.
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

    fn primitive(&self) -> bool {
        !self.name.contains("::") || self.name.ends_with("::c_void")
    }
}

/// The forms of a function's arguments, and of its result.
pub(crate) trait Shape {
    fn shape() -> (Vec<Form>, Form);
}

pub(crate) fn shape_of<F: Shape>(_: F) -> (Vec<Form>, Form) {
    F::shape()
}

/// The result of a function that the other side does not declare.
pub(crate) enum Missing {}

/// Whether two functions can be called alike; nothing if the other side does not declare it.
pub(crate) fn agree(ours: &(Vec<Form>, Form), theirs: &(Vec<Form>, Form)) -> Option<bool> {
    if theirs.1.2 == type_name::<Missing>() {
        return None;
    }
    let arguments = ours.0.len() == theirs.0.len() && ours.0.iter().zip(&theirs.0).all(|(a, b)| a.agrees(b));
    Some(arguments && ours.1.agrees(&theirs.1))
}

macro_rules! shapes {
    ($($arg:ident)*) => {
        impl<R, $($arg),*> Shape for unsafe fn($($arg),*) -> R {
            fn shape() -> (Vec<Form>, Form) {
                (vec![$(Form::of::<$arg>()),*], Form::of::<R>())
            }
        }
        shapes! { @less $($arg)* }
    };
    (@less) => {};
    (@less $first:ident $($rest:ident)*) => { shapes! { $($rest)* } };
}

shapes! { A B C D E F G H I J K L M N O P Q S }

/// A function pointer type of a number of arguments, all to be inferred.
macro_rules! inferred {
    ($($arg:ident)*) => { unsafe fn($(inferred!(@ $arg)),*) -> _ };
    (@ $arg:ident) => { _ };
}
pub(crate) use inferred;

#[test]
fn shapes_differ_where_they_should() {
    let shape = |f: unsafe fn(*mut u32)| shape_of(f);
    let same: unsafe fn(*mut u32) = |_| ();
    let narrower: unsafe fn(*mut u16) = |_| ();
    let constant: unsafe fn(*const u32) = |_| ();
    let deeper: unsafe fn(*mut *mut u32) = |_| ();
    let by_value: unsafe fn(u32) = |_| ();
    assert_eq!(agree(&shape(same), &shape_of(same)), Some(true));
    assert_eq!(agree(&shape(same), &shape_of(narrower)), Some(false));
    assert_eq!(agree(&shape(same), &shape_of(constant)), Some(false));
    assert_eq!(agree(&shape(same), &shape_of(deeper)), Some(false));
    assert_eq!(agree(&shape(same), &shape_of(by_value)), Some(false));
}
