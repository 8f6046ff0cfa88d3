window.MathJax = {
  tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
  // The menu would fetch more of MathJax, which is not part of the site.
  options: { processHtmlClass: "arithmatex", ignoreHtmlClass: ".*|", enableMenu: false },
};
