//! Builds templates: snapshots of booted and prepared guests, from which clones start.
//!
//! ```text
//! boot → identity → files → setup → start → ready → warm-up → sync → quiet → snapshot      one VM
//! restore → identity → first work → working set                       the template's first clone
//! ```
//! A [`Recipe`] lists all inputs of a template. It is written into the template, so that the template can be rebuilt
//! with another VMM or another kernel. The recipe is trusted like the VMM's other options. The guest is not trusted:
//! every wait for it has a limit.
//!
//! What must never happen: an incomplete directory under the name of a template. The caller gives [`Builder::build`] a
//! temporary directory, and renames it when the build has succeeded.

mod agent;
mod base;
mod build;
mod error;
mod quiet;
mod recipe;
mod sum;

pub use base::{SLOT_WARM_UP, WARM_UP, WARM_UP_RUNS, add_maker, base};
pub use build::{Builder, Limits, Report, files_of};
pub use error::{BuildError, Cause, Step};
pub use quiet::{Quiet, until_quiet};
pub use recipe::{Input, RECIPE_NAME, Recipe, Work};
pub use sum::{file_sum, sparse_sum, sparse_sum_unless};
