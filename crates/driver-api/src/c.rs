//! What the declarations of both libraries are written with.

/// Types that are only ever seen behind a pointer: what is there is the driver's.
macro_rules! opaque {
    ($($name:ident,)*) => { $(pub enum $name {})* };
}

/// Structures and unions with C's layout. All of them are copied freely, and zero by default.
macro_rules! c_types {
    ($($(#[$meta:meta])* pub $kind:tt $name:ident { $(pub $field:ident: $type:ty,)* })*) => { $(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub $kind $name { $(pub $field: $type,)* }

        impl Default for $name {
            #[allow(unsafe_code)]
            fn default() -> Self {
                // SAFETY: all fields are integers, floats, raw pointers, optional functions, or made of
                // these; zero is a value of each.
                unsafe { core::mem::zeroed() }
            }
        }
    )* };
}

/// The failures of a library: a type for them, a constant for each, and the table of their names and texts.
macro_rules! failures {
    (
        $(#[$doc:meta])* $error:ident: $code:ident, success $success:ident $success_text:literal,
        $($short:ident = $name:ident $text:literal,)*
    ) => {
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        pub struct $error(core::num::NonZeroU32);

        impl $error {
            $(
                #[doc = $text]
                pub const $short: Self = Self::constant($name);
            )*

            const fn constant(code: $code) -> Self {
                match core::num::NonZeroU32::new(code) {
                    Some(code) => Self(code),
                    None => panic!("success is not a failure"),
                }
            }

            /// The failure with this code; nothing for success. A code of a newer driver is kept as it is.
            pub const fn from_code(code: $code) -> Option<Self> {
                match core::num::NonZeroU32::new(code) {
                    Some(code) => Some(Self(code)),
                    None => None,
                }
            }

            /// The number that the C function returns.
            pub const fn code(self) -> $code {
                self.0.get()
            }

            /// The name in C; nothing if the code is not in the table.
            pub fn name(self) -> Option<&'static core::ffi::CStr> {
                name(self.code())
            }

            /// A few words on it; nothing if the code is not in the table.
            pub fn text(self) -> Option<&'static core::ffi::CStr> {
                text(self.code())
            }
        }

        impl core::fmt::Debug for $error {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(&name.to_string_lossy()),
                    None => write!(f, "{}({})", stringify!($error), self.code()),
                }
            }
        }

        impl core::fmt::Display for $error {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.text() {
                    Some(text) => f.write_str(&text.to_string_lossy()),
                    None => write!(f, "error {}", self.code()),
                }
            }
        }

        impl core::error::Error for $error {}

        /// Every code, success included, in ascending order, with its name and a few words on it.
        pub const CODES: &[($code, &core::ffi::CStr, &core::ffi::CStr)] = &[
            (
                $success,
                terminated(concat!(stringify!($success), "\0")),
                terminated(concat!($success_text, "\0")),
            ),
            $(($name, terminated(concat!(stringify!($name), "\0")), terminated(concat!($text, "\0"))),)*
        ];

        fn entry(code: $code) -> Option<&'static ($code, &'static core::ffi::CStr, &'static core::ffi::CStr)> {
            CODES.binary_search_by_key(&code, |entry| entry.0).ok().and_then(|at| CODES.get(at))
        }

        /// The name in C of a code, success included; nothing if it is not in the table.
        pub fn name(code: $code) -> Option<&'static core::ffi::CStr> {
            entry(code).map(|entry| entry.1)
        }

        /// A few words on a code, success included; nothing if it is not in the table.
        pub fn text(code: $code) -> Option<&'static core::ffi::CStr> {
            entry(code).map(|entry| entry.2)
        }

        /// What a C function returns for this outcome.
        pub const fn status(outcome: Result<(), $error>) -> $code {
            match outcome {
                Ok(()) => $success,
                Err(failure) => failure.code(),
            }
        }

        /// The outcome that a C function's return value stands for.
        pub const fn check(code: $code) -> Result<(), $error> {
            match $error::from_code(code) {
                None => Ok(()),
                Some(failure) => Err(failure),
            }
        }
    };
}

/// A text of the tables above for C.
pub(crate) const fn terminated(text: &'static str) -> &'static core::ffi::CStr {
    match core::ffi::CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("a text of a table ends with its only NUL"),
    }
}
