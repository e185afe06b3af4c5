//! The steps of a build in order, and how many of them are cached.

use super::{Build, cached_line, origin::Origin, text};
use crate::{
    key::Key,
    layers::Layer,
    plan::{At, Step, StepKind},
    settings::{DEFAULT_USER, Settings},
};

/// A step of the order, or an implicit step before it.
pub(super) struct Stage {
    pub(super) at: At,
    /// `builder 1/2`
    pub(super) prefix: String,
    pub(super) step: Step,
}

/// Progress of a build.
pub(super) struct Reached {
    /// The result of the last step.
    pub(super) result: Key,
    pub(super) settings: Settings,
    /// `None`: the disk of the origin, which has not been needed yet.
    pub(super) layer: Option<Layer>,
    /// Number of completed stages.
    pub(super) stages: usize,
}

impl Build<'_> {
    /// The steps in order. Builds from images first create E2B's sandbox user, which templates already have. The
    /// settings from an image's config follow.
    pub(super) fn stages(&self, origin: &Origin) -> Vec<Stage> {
        let user = Step {
            kind: StepKind::User,
            args: vec![DEFAULT_USER.to_owned(), "true".to_owned()],
            files: None,
            force: false,
        };
        let user = origin
            .lacks_user
            .then_some((At::Base, "base".to_owned(), user));
        let base = |kind, word: &String| {
            let step = Step {
                kind,
                args: vec![word.clone()],
                files: None,
                force: false,
            };
            (At::Base, "base".to_owned(), step)
        };
        let config = origin.image.iter().flat_map(|image| {
            [
                base(StepKind::User, &image.user),
                base(StepKind::Workdir, &image.workdir),
            ]
        });
        let count = self.order.steps.len();
        let steps = self.order.steps.iter().zip(1..);
        let steps =
            steps.map(|(step, n)| (At::Step(n), format!("builder {n}/{count}"), step.clone()));
        let stages = user.into_iter().chain(config).chain(steps);
        let stage = |(at, prefix, step)| Stage { at, prefix, step };
        stages.map(stage).collect()
    }

    /// The key of a stage that follows this result.
    pub(super) fn key(&self, result: Key, stage: &Stage) -> Key {
        let before = match stage.step.kind {
            // The hash does not cover the archive's bytes, so files are used for their own template only.
            StepKind::Copy => Key::of(&[&result.to_string(), &self.order.template_id]),
            StepKind::Run | StepKind::Env | StepKind::Workdir | StepKind::User => result,
        };
        before.after(&stage.step)
    }

    /// The last stage whose disk is in the cache. Stages from the first forced one on do not count.
    pub(super) async fn cached(&self, origin: &Origin, stages: &[Stage]) -> Reached {
        let layers = &self.executor.layers;
        let forced = stages.iter().position(|stage| stage.step.force);
        let usable = match forced {
            _ if self.order.force => 0,
            None => stages.len(),
            Some(forced) => forced,
        };
        let (mut result, mut keys) = (origin.key, Vec::new());
        for stage in &stages[..usable] {
            let key = self.key(result, stage);
            let Some(next) = layers.result(key) else {
                break;
            };
            keys.push(key);
            result = next;
        }
        while let Some(key) = keys.last() {
            let Some(found) = layers.find(*key).await else {
                keys.pop();
                continue;
            };
            for (stage, key) in stages.iter().zip(&keys) {
                let line = cached_line(&stage.prefix, &text(&stage.step), *key);
                self.note(stage.at, &line);
            }
            return Reached {
                result: found.result,
                settings: found.settings,
                layer: Some(found.layer),
                stages: keys.len(),
            };
        }
        Reached {
            result: origin.key,
            settings: origin.settings.clone(),
            layer: None,
            stages: 0,
        }
    }
}
