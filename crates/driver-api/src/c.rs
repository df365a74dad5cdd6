//! Macros for the declarations of both libraries.

/// Declares opaque types, which are used only behind pointers.
macro_rules! opaque {
    ($($name:ident,)*) => { $(pub enum $name {})* };
}

/// Declares structures and unions with C layout. All of them are `Copy` and zero by default.
macro_rules! c_types {
    ($($(#[$meta:meta])* pub $kind:tt $name:ident { $(pub $field:ident: $type:ty,)* })*) => { $(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub $kind $name { $(pub $field: $type,)* }

        impl Default for $name {
            #[allow(unsafe_code)]
            fn default() -> Self {
                // SAFETY: all fields are integers, floats, raw pointers, optional function pointers, or composed
                // of these; all zeros is a valid value of each.
                unsafe { core::mem::zeroed() }
            }
        }
    )* };
}

/// Declares the errors of a library: a type, a constant for each error, and the table of names and texts.
macro_rules! errors {
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
                    None => panic!("success is not an error"),
                }
            }

            /// Returns the error with this code; `None` for success. Codes of newer drivers are kept unchanged.
            pub const fn from_code(code: $code) -> Option<Self> {
                match core::num::NonZeroU32::new(code) {
                    Some(code) => Some(Self(code)),
                    None => None,
                }
            }

            /// Returns the code that the C function returns.
            pub const fn code(self) -> $code {
                self.0.get()
            }

            /// Returns the C name; `None` if the code is not in the table.
            pub fn name(self) -> Option<&'static core::ffi::CStr> {
                name(self.code())
            }

            /// Returns a short description; `None` if the code is not in the table.
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

        /// All codes including success, in ascending order, with their names and descriptions.
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

        /// Returns the C name of a code, including success; `None` if it is not in the table.
        pub fn name(code: $code) -> Option<&'static core::ffi::CStr> {
            entry(code).map(|entry| entry.1)
        }

        /// Returns the description of a code, including success; `None` if it is not in the table.
        pub fn text(code: $code) -> Option<&'static core::ffi::CStr> {
            entry(code).map(|entry| entry.2)
        }

        /// Converts a result to the code that a C function returns.
        pub const fn status(result: Result<(), $error>) -> $code {
            match result {
                Ok(()) => $success,
                Err(error) => error.code(),
            }
        }

        /// Converts the return code of a C function to a result.
        pub const fn check(code: $code) -> Result<(), $error> {
            match $error::from_code(code) {
                None => Ok(()),
                Some(error) => Err(error),
            }
        }
    };
}

/// Converts a string of the tables above to a C string at compile time.
pub(crate) const fn terminated(text: &'static str) -> &'static core::ffi::CStr {
    match core::ffi::CStr::from_bytes_with_nul(text.as_bytes()) {
        Ok(text) => text,
        Err(_) => panic!("strings of the tables end with their only NUL"),
    }
}
