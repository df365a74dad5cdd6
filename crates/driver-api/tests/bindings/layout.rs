//! Structures and values beside each other.

/// Compares size, alignment and places of fields. `=` gives the other side's name where it differs.
macro_rules! same_layout {
    ($($ours:ident $(= $theirs:ident)? { $($fields:tt)* })*) => { $(
        same_layout! { @struct $ours [$($theirs)? $ours] $($fields)* }
    )* };
    (@struct $ours:ident [$theirs:ident $($rest:ident)?] $($field:ident $(= $other:ident)?)*) => {
        let name = stringify!($ours);
        assert_eq!(size_of::<ours::$ours>(), size_of::<theirs::$theirs>(), "size of {name}");
        assert_eq!(align_of::<ours::$ours>(), align_of::<theirs::$theirs>(), "alignment of {name}");
        $(same_layout! { @field $ours $theirs $field [$($other)? $field] })*
    };
    (@field $ours:ident $theirs:ident $field:ident [$other:ident $($rest:ident)?]) => {
        assert_eq!(
            std::mem::offset_of!(ours::$ours, $field),
            std::mem::offset_of!(theirs::$theirs, $other),
            "place of {}::{}", stringify!($ours), stringify!($field),
        );
    };
}
