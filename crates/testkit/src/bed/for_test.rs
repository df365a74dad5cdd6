//! Provides a bed to a test, or skips the test.

use super::{BedError, BedProfile, TestBed};
use crate::skip_or_fail;

impl TestBed {
    /// Starts a bed for a test. If this machine lacks a requirement, the test is skipped, and fails in CI. If the bed
    /// itself does not start, the test fails.
    ///
    /// ```no_run
    /// use partage_testkit::bed::{TestBed, BedProfile};
    /// # fn test() {
    /// let Some(bed) = TestBed::for_test(BedProfile::one_node()) else { return };
    /// # }
    /// ```
    pub fn for_test(profile: BedProfile) -> Option<Self> {
        match Self::start(profile) {
            Ok(bed) => Some(bed),
            Err(
                missing @ (BedError::MissingPrerequisite(_)
                | BedError::NotRoot
                | BedError::NoTool { .. }
                | BedError::NoCgroups { .. }),
            ) => {
                skip_or_fail(&missing);
                None
            }
            // A test fails by a panic.
            #[allow(clippy::panic)]
            Err(error) => panic!("the test bed did not start: {error}"),
        }
    }
}
