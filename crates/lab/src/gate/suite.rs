//! The cases that every kernel is put through.

use evosdpa_core::{Alignment, DType, Error, Layout, Mask, Precision, Problem, Shape, Sizes};
use evosdpa_oracle::{
    Case,
    inputs::{Arrangement, Family, Inputs, LengthFamily},
};

/// What a group of cases is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// The acceptance shapes, N(0, 1), several seeds.
    Acceptance,
    /// Every input family, full and causal, with NaN in the gaps between rows.
    Families,
    /// Lengths that no tile divides, and query and key lengths that differ.
    Lengths,
    /// Head dimensions of every kind.
    HeadDims,
    /// Windows, both causal alignments, rows that see nothing.
    Masks,
    /// Shared key/value heads, and the other layout.
    HeadsAndLayouts,
    /// Small cases for the simulator.
    Simulated,
    /// Few cases that between them reach every branch of a kernel, for putting every variant through.
    Variants,
}

impl Group {
    /// The groups of the whole suite, in the order they run; the simulator and variants have their own.
    pub const ALL: [Self; 6] =
        [Self::Families, Self::Lengths, Self::HeadDims, Self::Masks, Self::HeadsAndLayouts, Self::Acceptance];

    /// Its name in tables and records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Acceptance => "acceptance",
            Self::Families => "families",
            Self::Lengths => "lengths",
            Self::HeadDims => "head dims",
            Self::Masks => "masks",
            Self::HeadsAndLayouts => "heads, layouts",
            Self::Simulated => "simulated",
            Self::Variants => "variants",
        }
    }
}

/// A case that has not been drawn and solved yet.
#[derive(Clone, Copy, Debug)]
pub struct CaseSpec {
    /// What it belongs to.
    pub group: Group,
    /// What is asked.
    pub problem: Problem,
    /// How inputs are drawn.
    pub family: Family,
    /// With which seed.
    pub seed: u64,
    /// Gap between rows of the inputs, filled with NaN.
    pub row_gap: Option<usize>,
    /// How long sequences are, where lengths are data; `None` for what family and seed draw.
    pub lengths: Option<LengthFamily>,
}

impl CaseSpec {
    /// Draws the inputs and solves the problem.
    pub fn build(&self) -> Case {
        Case::arranged(self.problem, self.family, self.seed, self.row_gap, self.arrangement())
    }

    fn arrangement(&self) -> Arrangement {
        let drawn = Arrangement::of(self.family, self.seed);
        Arrangement { lengths: self.lengths.unwrap_or(drawn.lengths), ..drawn }
    }

    /// Draws the inputs alone.
    pub fn inputs(&self) -> Inputs {
        Inputs::arranged(&self.problem, self.family, self.seed, self.row_gap, self.arrangement())
    }

    /// What is asked, with the lengths where they are not drawn.
    pub fn asked(&self) -> String {
        match self.lengths {
            None => self.problem.to_string(),
            Some(lengths) => format!("{}, {lengths} lengths", self.problem),
        }
    }

    /// How the case is called in reports.
    pub fn label(&self) -> String {
        format!("{} {} seed {}", self.asked(), self.family, self.seed)
    }
}

/// Lengths that are a multiple of no tile.
const LENGTHS: [usize; 7] = [1, 3, 33, 63, 65, 511, 513];

/// Query and key lengths that differ.
const PAIRS: [(usize, usize); 11] = [
    (1, 1),
    (64, 128),
    (128, 192),
    (239, 1),
    (799, 3),
    (113, 203),
    (108, 256),
    (384, 256),
    (512, 256),
    (1023, 1024),
    (1024, 1023),
];

/// Head dimensions: powers of two, multiples of eight only, and none.
const HEAD_DIMS: [(usize, usize); 12] = [
    (32, 32),
    (40, 40),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (160, 160),
    (256, 256),
    (192, 128),
    (1, 1),
    (17, 5),
    (512, 512),
];

const TOP_LEFT: Mask = Mask::Causal(Alignment::TopLeft);
const BOTTOM_RIGHT: Mask = Mask::Causal(Alignment::BottomRight);

/// The cases of the chosen groups for one dtype; `seeds` counts the seeds of the acceptance set.
pub fn cases(groups: &[Group], dtype: DType, seeds: u64) -> Result<Vec<CaseSpec>, Error> {
    let mut all = Vec::new();
    for &group in groups {
        match group {
            Group::Acceptance => acceptance(dtype, seeds, &mut all)?,
            Group::Families => families(dtype, &mut all)?,
            Group::Lengths => lengths(dtype, &mut all)?,
            Group::HeadDims => head_dims(dtype, &mut all)?,
            Group::Masks => masks(dtype, &mut all)?,
            Group::HeadsAndLayouts => heads_and_layouts(dtype, &mut all)?,
            Group::Simulated => all.extend(simulated(dtype)?),
            Group::Variants => all.extend(variants(dtype)?),
        }
    }
    // The log-sum-exp is checked wherever there is one.
    all.iter_mut().for_each(|spec| spec.problem = spec.problem.with_lse(true));
    if groups.contains(&Group::Masks) {
        all.push(without_lse(Group::Masks, dtype)?);
    }
    Ok(all)
}

/// What kernels of one's own forget first: rows that see no key, where dividing by their sum makes a NaN, and a log-sum-exp that
/// nobody wants, whose pointer is null.
fn without_lse(group: Group, dtype: DType) -> Result<CaseSpec, Error> {
    let problem = Problem::new("b1h2s13/9d64:causal-br".parse()?, dtype)?.with_lse(false);
    Ok(CaseSpec { group, problem, family: Family::Normal, seed: 1, row_gap: Some(8), lengths: None })
}

/// Cases small enough to simulate: whole and ragged tiles, every mask, shared heads, rows that see nothing, a log-sum-exp that is not
/// wanted, and the one length that some kernels are made for.
pub fn simulated(dtype: DType) -> Result<Vec<CaseSpec>, Error> {
    let texts = [
        "tiny",
        "tiny:causal",
        "b1h2/1s33/65d64:causal-br",
        "b1h1s70/40d40:window=9/3",
        "b1h1s20d128",
        "b1h1s512d64:causal",
    ];
    let case = |text: &&str| {
        let problem = Problem::new(text.parse()?, dtype)?.with_lse(true);
        // In one of them rows start where no wide copy may.
        let row_gap = if text.contains("window") { 5 } else { 8 };
        Ok(CaseSpec {
            group: Group::Simulated,
            problem,
            family: Family::Normal,
            seed: 1,
            row_gap: Some(row_gap),
            lengths: None,
        })
    };
    texts.iter().map(case).chain([without_lse(Group::Simulated, dtype)]).collect()
}

/// Cases for kernels with a thousand variants: ragged and whole tiles, shared heads, a window and a causal mask, scores of
/// every size, dimensions 64 and 128, rows that may and rows that may not be copied 16 bytes at a time.
pub fn variants(dtype: DType) -> Result<Vec<CaseSpec>, Error> {
    let cases = [
        ("mission", Family::Normal, None),
        ("mission:causal", Family::Normal, None),
        ("b1h4/2s77/130d64:causal-br", Family::Normal, Some(16)),
        ("b1h2s130/77d40:window=31/3", Family::LargeLogits, Some(5)),
        ("b1h2s70/77d128:causal", Family::Normal, Some(16)),
    ];
    let case = |(text, family, row_gap): (&str, Family, Option<usize>)| {
        let problem = Problem::new(text.parse()?, dtype)?.with_lse(true);
        Ok(CaseSpec { group: Group::Variants, problem, family, seed: 6, row_gap, lengths: None })
    };
    cases.into_iter().map(case).collect()
}

fn acceptance(dtype: DType, seeds: u64, all: &mut Vec<CaseSpec>) -> Result<(), Error> {
    for seed in 0..seeds {
        for text in ["mission", "mission:causal", "long", "long:causal", "long128"] {
            let problem = Problem::new(text.parse()?, dtype)?;
            all.push(CaseSpec {
                group: Group::Acceptance,
                problem,
                family: Family::Normal,
                seed,
                row_gap: None,
                lengths: None,
            });
        }
    }
    Ok(())
}

fn families(dtype: DType, all: &mut Vec<CaseSpec>) -> Result<(), Error> {
    for family in Family::ALL {
        // Queries that end before the keys do leave keys that nobody sees.
        let seq_q = if family == Family::HiddenKeys { 77 } else { 130 };
        for mask in [Mask::Full, TOP_LEFT] {
            let sizes = Sizes { heads_q: 4, heads_kv: 2, seq_q, ..Sizes::square(2, 4, 130, 64) };
            let problem = Problem::new(Shape::new(sizes, mask)?, dtype)?;
            all.push(CaseSpec {
                group: Group::Families,
                problem,
                family,
                seed: 1,
                row_gap: Some(8),
                lengths: None,
            });
        }
    }
    // Past 256 keys 16-bit weights show, unless high precision is asked for.
    for family in Family::ALL {
        for text in ["b1h4/2s70/515d64", "b1h4/2s70/515d64:causal-br", "b1h4/2s70/515d64:precise"] {
            let problem = Problem::new(text.parse()?, dtype)?;
            if problem.precision() == Precision::Default || !dtype.is_eight_bit() {
                all.push(CaseSpec {
                    group: Group::Families,
                    problem,
                    family,
                    seed: 1,
                    row_gap: Some(8),
                    lengths: None,
                });
            }
        }
    }
    Ok(())
}

fn lengths(dtype: DType, all: &mut Vec<CaseSpec>) -> Result<(), Error> {
    let mut push = |seq_q, seq_kv, mask| -> Result<(), Error> {
        let sizes = Sizes { seq_q, seq_kv, ..Sizes::square(1, 2, 1, 64) };
        let problem = Problem::new(Shape::new(sizes, mask)?, dtype)?;
        all.push(CaseSpec {
            group: Group::Lengths,
            problem,
            family: Family::Normal,
            seed: 2,
            row_gap: Some(24),
            lengths: None,
        });
        Ok(())
    };
    for seq in LENGTHS {
        push(seq, seq, Mask::Full)?;
        push(seq, seq, TOP_LEFT)?;
    }
    for (seq_q, seq_kv) in PAIRS {
        push(seq_q, seq_kv, Mask::Full)?;
        push(seq_q, seq_kv, TOP_LEFT)?;
        push(seq_q, seq_kv, BOTTOM_RIGHT)?;
    }
    Ok(())
}

fn head_dims(dtype: DType, all: &mut Vec<CaseSpec>) -> Result<(), Error> {
    for (dim_qk, dim_v) in HEAD_DIMS {
        let sizes = Sizes { dim_qk, dim_v, seq_kv: 77, ..Sizes::square(1, 2, 70, 1) };
        let problem = Problem::new(Shape::new(sizes, BOTTOM_RIGHT)?, dtype)?;
        all.push(CaseSpec {
            group: Group::HeadDims,
            problem,
            family: Family::Normal,
            seed: 3,
            row_gap: Some(8),
            lengths: None,
        });
    }
    Ok(())
}

fn masks(dtype: DType, all: &mut Vec<CaseSpec>) -> Result<(), Error> {
    for text in [
        "b1h2s200d64:window=31/0",
        "b1h2s200d64:window=0/0",
        "b1h2s150/200d64:window=17/5",
        "b1h2s200/150d64:window-tl=inf/3",
        "b1h2s100/300d64:window=64/inf",
        // The first rows see nothing at all.
        "b1h2s300/100d64:causal-br",
        // Most rows see nothing: the window has slid past the last key.
        "b1h2s300/40d64:window-tl=8/0",
    ] {
        let problem = Problem::new(text.parse()?, dtype)?;
        all.push(CaseSpec {
            group: Group::Masks,
            problem,
            family: Family::Normal,
            seed: 4,
            row_gap: Some(8),
            lengths: None,
        });
    }
    Ok(())
}

fn heads_and_layouts(dtype: DType, all: &mut Vec<CaseSpec>) -> Result<(), Error> {
    for text in ["b2h8/2s65d64:causal", "b1h8/1s33/129d64", "b2h32/8s1/300d128", "b1h6/3s7/65d64:causal-br"] {
        for layout in Layout::ALL {
            let problem = Problem::new(text.parse()?, dtype)?.with_layout(layout);
            let group = Group::HeadsAndLayouts;
            all.push(CaseSpec {
                group,
                problem,
                family: Family::Normal,
                seed: 5,
                row_gap: Some(8),
                lengths: None,
            });
        }
    }
    let scaled = Problem::new("b1h2s65d64".parse()?, dtype)?.with_scale(0.03)?;
    let group = Group::HeadsAndLayouts;
    all.push(CaseSpec {
        group,
        problem: scaled,
        family: Family::Normal,
        seed: 5,
        row_gap: None,
        lengths: None,
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rules of 8-bit kernels are wider than the others': no case may be so mild that a wrong answer keeps them.
    #[test]
    fn no_eight_bit_case_accepts_a_control() {
        let groups = [
            Group::Families,
            Group::Lengths,
            Group::HeadDims,
            Group::Masks,
            Group::HeadsAndLayouts,
            Group::Variants,
        ];
        for dtype in DType::EIGHT_BIT {
            // The longest add time and nothing that shorter ones do not show.
            let small =
                |spec: &CaseSpec| spec.problem.sizes().seq_q * spec.problem.sizes().seq_kv < 300 * 300;
            for spec in cases(&groups, dtype, 1).unwrap().into_iter().filter(small) {
                let case = spec.build();
                let accepted = case.accepted_controls(|o| case.judge(o, None).passed());
                assert!(accepted.is_empty(), "{}: {accepted:?}", spec.label());
            }
        }
    }
}
