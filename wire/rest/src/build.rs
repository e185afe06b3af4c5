//! Builds of templates.

use serde::{Deserialize, Serialize};

use super::LogLevel;
use envd::Timestamp;

/// Body of `POST /v3/templates`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NewBuild {
    /// `name` or `name:tag`.
    pub name: Option<String>,
    /// Older name of the key `name`.
    pub alias: Option<String>,
    pub tags: Option<Vec<String>>,
    pub cpu_count: Option<i64>,
    /// Memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: Option<i64>,
    /// Minimum disk space of sandboxes, in MiB.
    pub min_free_disk_mb: Option<i64>,
}

/// Response to `POST /v3/templates`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RequestedBuild {
    #[serde(rename = "templateID")]
    pub template_id: String,
    #[serde(rename = "buildID")]
    pub build_id: String,
    /// Same as [`super::Template::public`].
    pub public: bool,
    /// Names without tags.
    pub names: Vec<String>,
    pub tags: Vec<String>,
    /// Same as `names`, for older clients.
    pub aliases: Vec<String>,
}

/// Response to `GET /templates/{id}/files/{hash}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileUpload {
    /// Whether files with this hash have already been uploaded.
    pub present: bool,
    /// URL that accepts a PUT of the archive without a key.
    pub url: String,
}

/// Body of `POST /v2/templates/{id}/builds/{build}`.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StartBuild {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_image: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_template: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from_image_registry: Option<ImageRegistry>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub force: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<Vec<BuildStep>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_cmd: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_cmd: Option<String>,
    /// Settings taken from the config of `from_image`, in addition to its variables. Not part of E2B's interface.
    /// Absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_config: Option<ImageConfig>,
}

/// The part of an image's config that a build uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ImageConfig {
    /// USER and WORKDIR apply from the first step on and to sandboxes, whose processes also get the variables.
    Defaults,
    /// Like `Defaults`; also, ENTRYPOINT with CMD is the start command if the build has none.
    Start,
}

/// Body of `POST /templates/{id}/redo`, which is not part of E2B's interface.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct RedoTemplate {
    /// Run all steps, even those in the cache.
    pub skip_cache: bool,
    pub from_image_registry: Option<ImageRegistry>,
}

/// Response to `GET /templates/{id}/order`: the order of a build. Not part of E2B's interface.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BuildOrder {
    #[serde(rename = "templateID")]
    pub template_id: String,
    #[serde(rename = "buildID")]
    pub build_id: String,
    pub cpu_count: u8,
    /// Memory in MiB.
    #[serde(rename = "memoryMB")]
    pub memory_mb: u64,
    /// As in [`NewBuild`]. 0: all available space.
    pub min_free_disk_mb: u64,
    /// Whether the start included registry credentials, which are not stored.
    pub had_credentials: bool,
    /// Without credentials and without flags that skip the cache.
    pub start: StartBuild,
}

/// A step of a build.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BuildStep {
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub args: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files_hash: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force: Option<bool>,
}

/// Credentials for a registry. Contains secrets, so it has no `Debug`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "type",
    rename_all = "lowercase",
    rename_all_fields = "camelCase"
)]
pub enum ImageRegistry {
    Registry {
        username: String,
        password: String,
    },
    Aws {
        aws_access_key_id: String,
        aws_secret_access_key: String,
        aws_region: String,
    },
    Gcp {
        /// The JSON text of a service account key.
        service_account_json: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BuildStatus {
    /// Requested but not started.
    Waiting,
    Building,
    Ready,
    Error,
}

/// Response to `GET /templates/{id}/builds/{build}/status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BuildInfo {
    #[serde(rename = "templateID")]
    pub template_id: String,
    #[serde(rename = "buildID")]
    pub build_id: String,
    pub status: BuildStatus,
    /// The messages of `log_entries`, for older clients.
    pub logs: Vec<String>,
    pub log_entries: Vec<BuildLogEntry>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<StatusReason>,
}

/// Why a build failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusReason {
    /// Text of the exception in the official clients.
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log_entries: Vec<BuildLogEntry>,
}

/// An entry of a build's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildLogEntry {
    pub timestamp: Timestamp,
    pub message: String,
    pub level: LogLevel,
    /// `base`, the number of a step counted from 1, or `finalize`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

/// Response to `GET /templates/{id}/builds/{build}/logs`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildLogs {
    pub logs: Vec<BuildLogEntry>,
}

/// Body of `POST /templates/tags`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignTags {
    /// `name:tag` of a ready build.
    pub target: String,
    pub tags: Vec<String>,
}

/// Response to `POST /templates/tags`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssignedTags {
    pub tags: Vec<String>,
    #[serde(rename = "buildID")]
    pub build_id: String,
}

/// Body of `DELETE /templates/tags`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeleteTags {
    /// Name without a tag.
    pub name: String,
    pub tags: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_read_as_the_official_clients_send_it() {
        let text = r#"{"fromImage":"python:3.12","force":false,"startCmd":null,"readyCmd":"sleep 1","unknown":1,
            "fromImageRegistry":{"type":"registry","username":"u","password":"p"},
            "steps":[{"type":"COPY","args":["a","/b","",""],"filesHash":"00","force":false,"forceUpload":true},
                     {"type":"RUN","args":null}]}"#;
        let start: StartBuild = serde_json::from_str(text).unwrap();
        assert_eq!(start.from_image.as_deref(), Some("python:3.12"));
        assert_eq!((start.from_template, start.force), (None, Some(false)));
        assert_eq!(start.start_cmd, None);
        assert_eq!(start.ready_cmd.as_deref(), Some("sleep 1"));
        let steps = start.steps.unwrap();
        assert_eq!(
            (steps[0].kind.as_str(), steps[0].force),
            ("COPY", Some(false))
        );
        assert_eq!(steps[0].args.as_deref().map(<[_]>::len), Some(4));
        assert_eq!(steps[0].files_hash.as_deref(), Some("00"));
        assert_eq!(steps[1].args, None);
        assert!(matches!(
            start.from_image_registry,
            Some(ImageRegistry::Registry { username, .. }) if username == "u"
        ));
        let printed = serde_json::to_string(&StartBuild {
            steps: Some(vec![BuildStep::default()]),
            ..StartBuild::default()
        });
        assert_eq!(printed.unwrap(), r#"{"steps":[{"type":""}]}"#);
        let aws = r#"{"type":"aws","awsAccessKeyId":"k","awsSecretAccessKey":"s","awsRegion":"r"}"#;
        let aws: ImageRegistry = serde_json::from_str(aws).unwrap();
        assert!(matches!(aws, ImageRegistry::Aws { aws_region, .. } if aws_region == "r"));
    }
}
