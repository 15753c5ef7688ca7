// Sphinx's own scores, except that records of decisions come after what users read.
var Scorer = {
  score: ([document, title, anchor, description, score]) =>
    document.startsWith("docs/decisions/") || document === "CHANGELOG" ? score / 10 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
