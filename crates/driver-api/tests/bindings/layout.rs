//! A macro that compares the layouts of structures.

/// Compares size, alignment and field offsets. `=` gives the other project's name if it differs.
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
            "offset of {}::{}", stringify!($ours), stringify!($field),
        );
    };
}
