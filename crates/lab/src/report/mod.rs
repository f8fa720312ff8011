//! Reports: stored runs as one page, or in the formats of other tools.
//!
//! [`Document::load`] gathers what is there of any number of runs; one exporter per file turns it into text. Reports are
//! always made from stored runs, so an old run can be rendered again for ever.

mod chart;
mod document;
mod evolution;
mod export;
mod html;
mod source;

pub use document::{Document, GateLine, Resource, Source};
pub use evolution::{Evaluation, Evolution};

use std::str::FromStr;

use evosdpa_core::error::nearest;

use crate::Error;

/// What a document is turned into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One page with plots, for a browser.
    Html,
    /// Text to read.
    Markdown,
    /// A line per kernel and problem.
    Csv,
    /// Kernel Tuner's results schema.
    T4,
    /// A timeline for Perfetto or Chrome's tracing page.
    Perfetto,
    /// What each way of proposing came to in tunes, and whether insights help.
    Strategies,
}

impl Format {
    /// Every format.
    pub const ALL: [Self; 6] =
        [Self::Html, Self::Markdown, Self::Csv, Self::T4, Self::Perfetto, Self::Strategies];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Html => "html",
            Self::Markdown => "md",
            Self::Csv => "csv",
            Self::T4 => "t4",
            Self::Perfetto => "perfetto",
            Self::Strategies => "strategies",
        }
    }

    /// The file it is written to when no other is named.
    pub fn file_name(self) -> &'static str {
        match self {
            Self::Html => "report.html",
            Self::Markdown => "report.md",
            Self::Csv => "report.csv",
            Self::T4 => "t4.json",
            Self::Perfetto => "trace.json",
            Self::Strategies => "strategies.md",
        }
    }

    /// Turns a document into text.
    pub fn render(self, document: &Document) -> Result<String, Error> {
        match self {
            Self::Html => html::render(document),
            Self::Markdown => Ok(export::markdown::render(document)),
            Self::Csv => Ok(export::csv::render(document)),
            Self::T4 => Ok(export::t4::render(document)),
            Self::Perfetto => Ok(export::perfetto::render(document)),
            Self::Strategies => Ok(export::strategies::render(document)),
        }
    }
}

impl FromStr for Format {
    type Err = evosdpa_core::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or_else(|| {
            evosdpa_core::Error::UnknownName {
                kind: "format",
                name: text.to_owned(),
                nearest: nearest(text, Self::ALL.map(Self::name)),
                allowed: Self::ALL.map(Self::name).join(", "),
            }
        })
    }
}
