//! A bed for a test, or the reason why there is none.

use super::{Bed, BedError, Profile};
use crate::skip_or_fail;

impl Bed {
    /// A bed for a test. Where this machine has not what it takes, the test is skipped, and fails in CI; where the bed
    /// itself does not come up, it fails.
    ///
    /// ```no_run
    /// use partage_testkit::bed::{Bed, Profile};
    /// # fn test() {
    /// let Some(bed) = Bed::for_test(Profile::one_node()) else { return };
    /// # }
    /// ```
    pub fn for_test(profile: Profile) -> Option<Self> {
        match Self::start(profile) {
            Ok(bed) => Some(bed),
            Err(
                missing @ (BedError::Missing(_)
                | BedError::NotRoot
                | BedError::NoTool { .. }
                | BedError::NoCgroups { .. }),
            ) => {
                skip_or_fail(&missing);
                None
            }
            // A test ends by a panic.
            #[allow(clippy::panic)]
            Err(error) => panic!("no bed: {error}"),
        }
    }
}
