//! Tests of the repository itself: its documents name only things that exist, its layout is described, and its CI
//! workflows call commands that exist.

mod documents;
mod layout;
mod manifests;
mod markdown;
mod results;
mod sources;
mod training;
mod workflows;
