"""JPEGs of 56 x 40 pixels with arithmetic coding, which no installed encoder writes.

`cjpeg -arithmetic -quality 80` of libjpeg-turbo wrote them.
"""

from base64 import b85decode

_PACKED = {
    "420": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00smF1_cBL1_cHO2L=cV5DE$j2?`Vr4-60&6c`v66c!d59VH(c8zUSR79cDjBPJ&)Dk&KsEif%8FeN"
        "A{DF534LjeZ|2MP!Z6AB6wC>j<TC@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@BBQ01*fPC;&JE0U`hb5"
        "di}c0sqVZ3IGrg1pyEd1^?Or3<CiG0ucid06zf#0H6t8Lo^u0iGt;S5$JRj_G_=NHtyZKixw9bu6NX~W|LrFj25zWvtCkRx#3+AktHv)uz07"
        "KgG05tI=huA{l$y7uty0gOa)&+H!o)oYtb2go&uHY3W&x4GRk%GiJORUIAz56899E98~nZ2b9qQir$S^;fH4VH{JV28ta~}M9vBi=p=ZR<u7"
        "=AIkUFk_eby(#=9c@Cb_tSt@s|GpxqJ#oZ^BFZ?PBgBJ3~wTU6w8j1bc8|B#f~V7Q_{<8%Z?aiJzjKce<RT2mb&)7KFhpWE&KJNfil6pZ%lX"
        "Xh-5aZ*2xK<L9tSMjhzEA#-1MQ6D;-c+Q>1u&2OV*wsyZ-wDj_`oSQ9H#04rc5h}Kk?^k-fZg`Q=z6m|qWG07h>mE>79vgXkpBQcd$Q*HNel"
        "{I(r#2(f?f$Oy=430wl$gPkJZtkuQeiT4a_w|<JTtj^DJ>mKgoB?Azy&9bWg=pve)SzXPnEw(d<4O0ou3)#vKC|_MvX_r;+2j;St?3tjAdWa"
        "ZG5W{lt?*OEA_%<_#8Hc)8@U#4*T&hFxNr)RbOaMW^$`EbbKCx<{c-X=#xZ`JP+*7L8};(?oW{h+weRrVn%)vinvZbBs_347p8E|Je"
    ),
    "444 restart": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00smF1_cBL1_cHO2L=cV5DE$j2?`Vr4-60&6c`v66c!d59VH(c8zUSR79cDjBPJ&)Dk&KsEif%8FeN"
        "A{DF534LjeZ|2MP!Z6AB6wC>j<TC@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@BBQ01*fPC;&JE0TBQK5"
        "di}c0sqVZ3IGrg1pyEd1^?Xu1ONj6+5ij#0RRFK0}%i}0RI4>30^}q7{!T#<&Lr-_kb+7ZT+~a&_G&f-M>Sir?Xvsd4GD3`{h0)bfs{6IYR%"
        "?(po7?gmT^&C53DyLwik@P(y?&VHODRfxDVeb}XRmI&P44Wc$S!soq}!Z3gpLfdA3bs=8bkyy&hiY7$9jp<SmSUZfV;(32!|X$qjTD4L`5e5"
        "~O2ZSoLHp@L?_X|0c%gdDaaB4&($|I+^ecv?<)qyWgnY&O+C@*3r*#gY*=l42rpj+1=3n1U!=C8w!ow3S?0-hAqiaX!kl|I_}<Dk0O~TD>fe"
        "voLt4n)R`o35gDyG%fPi{{VC0#8#aYl6`Q5;Rl6VLygF5|J2Y}TzAGH?8g59d<6zaLMs|G7G-q{)aIebUzCeY8Yh*`U0v?Yh^)`QvQ!<b3_$"
        "<Y(rNJg6{-$kIWN;zXCVT%qcH5LfUm7xOn5mn$^ypN-rarz^|<af*tdR^UbWjMec=Dr(VAs3Qt$2~%W|vCW8}N5zSS3KUO-~#Fu}{C=fGK%^"
        "=y{2qs>C>&;EEvT3y*i+ppgL*Zaa?2qt@+%h}?R!fD?J=46yT?Ee6QFw-j<N?I`7K7Gpa+%2v!caf|&>6*VOY0tv)fdA0ZV~tRQlrR^y@kt%"
        "e-fA3*Aw_<SEJohm>R=r=2rF?rzoi`zoGrG5M6XKHv!Q_h(b8#%Kq#eA-$F#^_J0+U0m2qnHd{<4=X)&ExYZH7z)PApuc*C|=$qH5|I*0vr8"
        "z{3pMUGhEqZEu=O?4YB<MF~jYJV#c?_Xa_j0dLiM1<h5d+VF?GF%XBS8Pt(x@#>SsjB*Zj(b@yC+il#w4;&g?hi}!ti0_d=bLe$z)#<fH)mv"
        "Nk832RmkcaApg|=0CK+9)LR4hGA$k>$OzGdTN5d-Za<o%x|dM7V%(LP6PlWSc||i2|JD9=0D-RIH2c0?2CbP?(wolP9xc$*tSPG<juXmpInA"
        "uH#-DIh7FVGW!2j0LX^ZQ?@l3+gmqJNBjP@pl%cl;-KWNlt6N8<3Zl(8Yd1yeOw2s2j5pF{{OBw&y{{WK#F^Yzu?~RuSz#;tBUil@vgaxE<I"
        "*ygKJR$G9ha+h9g5G&Vf}T58|Iq&ccF<NS9@3RB1oPwwER5rsc_#k=Aph9"
    ),
    "grey": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00smF1_cBL1_cHO2L=cV5DE$j2?`Vr4-60&6c`v66c!d59VH(c8zUSR79cDjBPJ&)Dk&KsEif%8FeN"
        "A{DF4X-3kU!x05|~w5di<p00saM5C#9*00;pA002J#{{Wx~UPCk(#fgIDe-Y?(6!vScuP=M4+5$zpw5?SwB2GQXK&I(afFrbq;)l^E@Q2b^l"
        "_gP{nJ-Zm0*&vRgbD-rde~TUJrkdG>B(d(ml8M7;$y}f7%t4)PU#Ye9pXHecm}rD&o-ypL)jIC5dQ%06qM#1juWy4jEB2Qk8s!w<Sy~UQVD-"
        "XKlP3YH^4Kl5hC6!2@64tU4WjcvH-o$$0_^K(sl~dtE0zx?8KO#s;!}ei;kf->6?i(KMsoEB3kS6OHtjIP~JRta>2$ze+^V0SN3L^a(g;1_2"
        "A~XLqGBSKcizEy91m-()5J`7W85t`|BwCPo3<V^?e8Rd{r?1;eQwb3nW$1yuMqWO1sp4(g;HgCjx%0A%#(N0mVLCeB_v5|Je"
    ),
    "420 progressive": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00smF1_cBL1_cHO2L=cV5DE$j2?`Vr4-60&6c`v66c!d59VH(c8zUSR79cDjBPJ&)Dk&KsEif%8FeN"
        "A{DF534LjeZ|2MP!Z6AB6wC>j<TC@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@BBR01*fPC;&JE0U`hb5"
        "di}c0sqVZ1^^HN5dYc$3<CiG0uTcb0006106+BZ?`FrC1_#eY0QX5ZTmEN$^z0!BXRH$E-b9Vx5J;(a>#*GQJAWlR9<}3<h%1-?$Wuv#)`up"
        "g--Fe;QzOUS!2iqu1P}%P+5iXv0RRC70v?)w0h?6t(Y*So5<)OrFnKm+#gh8J5DWuea@~TrdguP#Nu6j>PqA8mRBGC7CjCS&Rr??#gb`(#SW"
        ">|M%m4%t1^?Or2mu2D0Y3pcS>J{fI%}lnBX$Vmq+x@it{M=^0i7rLu!)MdZ{m-#48+7|MJp*|%R=cP%$Wbo00a>Q|Jncu0RjO5KLHgO29GK@"
        "wMZPY{O|P^Dy<SfrguINV7C1nfEOSC09~f48I1IAddAp|uk9M2*Sie=%m4%s1^?Or2mt{A20sGM59|NT00a;P|Jncu0RaF3KOszG=Aw-XRlG"
        "y8kFS*TkBe_6Q%q&^H*CU@xIV_b;_O5b;IoTF-_Y~+0kJ~hb=&zSH^?57Q2*Kh3<CiG0ssR5000nDg-oW;Yp!NT|I7dc5e5I+00;pC0RcY{-"
        "}b+gBz6Ki{vKd*pie0B3Jz{v{{S*5|I7dc5e5I+00;pB0RcY{vUyIS{JpaR90o$@BgR)n?Y5gp@Fk+Nld9bR%m4%s1^?Or2mt{A0Y4DD68Pg"
        "3ucO+g<q@%hvsyCs6ZAjTnht(X%2Dc*;n(taE<ehnH=|@eor{3Bj!k^4tk`0?=$Dj-9Gor6gj8NVGqZY8g44tIK<(F;VW#CJ9{r`9G>Syu`O"
        "H%g4vE}?lN?TV?Qrh|)|hBz_#XDFv-u7+@`8?DoDx<WnU?Z^vTiQ_*#"
    ),
    "422 progressive restart": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00smF1_cBL1_cHO2L=cV5DE$j2?`Vr4-60&6c`v66c!d59VH(c8zUSR79cDjBPJ&)Dk&KsEif%8FeN"
        "A{DF534LjeZ|2MP!Z6AB6wC>j<TC@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@3f>C@BBR01*fPC;&JE0U-ba5"
        "di}c0sqVZ1^^HN5dYl(1ONp8+5ij#0RRFJ0}ucJ0sjC$^&`_2kK$98&pmj<{BD#92-k!E(9oAMLkN-48=5D2FV$RXmJF!>(a#sOPhHn4B3d)"
        "6uPLGf&W>mQ(*4_SgijB{@j9p^)the<UC{I+|I_^GChhpZABH!uPzB)@wYwi|%>T>)1P}%P-2emt2mjgt2mt{A0R;jcntuVCRPfQf`lu2@F#"
        "pgfm0T_V04@wpCWGxD=?>8U(IwO%$^&Lxki6av3;VY=|I!2p96|n`7A>QrZYfm%(*x<pvsMcd))3Dq|I7dc5e5I<00aO8|Jncu0RsU6KLI-T"
        "2Zq8!0@@hSMs;)u|Ii*Vb1)%DXg)#x9ig%cfdA1I_v=hL^G6w>%jhVaME}w`mz=ZZ@Eaqu(M+?sVE@xQE+n{z^N{T;P{2khwM4-G%m4%t1^?"
        "Or2mt~C0Y3p2BDOffX?`mazSx2N^bso~fd9~YPkC@kqn%^72QA|N(KSj{#tJ)}Ul|qFrT@|%k^>Z}%$0b+uR8zJ7#O}k)Gt*Yre7`p0RB4v%"
        "m4%s1^?Xu1ONyB+5iXv0RRR+0?rTc|Iony(ZK)G!2i?0|I7dc5C#9*00;pA00BQCOk?JvjS5w~L$Z&s|In&dFMx?mG5+L^mp2Rgc>mGLRAS!"
        "6M$8Z9@(@7((qtKA1_W076yosz({FEiD;w+*k_vGD-2emt1pnFq3<CiG0ssR5000nW?*Gt=a{tl#4S@gB{2~9-=kfo{00a>Q|Jncu0RsU6KM"
        "?%#Y54s%oml_S<dW7k@%1$D|IzA0awztd`dI(cIIUUUrZ@xO|I_dEO)rh5|I7dc5e5I+00;pB0RcY{94PJ`LFrgBIRDVA-jq}k1%ojE(S=id"
        "NConM|Iz}7FS}|F!2i>M3E2|~)RG+k%m4%s1^?Xu1ONyB+5iXv0RRC%5WEuj;}ox>+NR|Zv4XQ&GW8SmKh>HJeox9#>XiS`bIlNopF^#RWs-"
        "1iTwsTVwjzE2y^~Ql!2i)LS(=mOB8J2@h!$zVM?|ViFy<IeCw0j!^O$s_nU;|M((~<<kv_h7u=h&n56Dy#Ss55kPGUKs00xfV_0yI&8voPtd"
        "GY6_3mTG-7e?zA)^^r@OCmNuVV#1(%m3K"
    ),
    "grey progressive": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00smF1_cBL1_cHO2L=cV5DE$j2?`Vr4-60&6c`v66c!d59VH(c8zUSR79cDjBPJ&)Dk&KsEif%8FeN"
        "A{DF4a;3kU!x05|~w5di<p00aOK|Jncu0RaF200I91KlJ8#HBBK(jhzrr+J&@qMlL)mxowC?Oj{o|S9sp+Bmc|*1P}%P+5iXv0RRC70v?)w0"
        "h?6t(Y*So5<)OrFnKm+#gh8J5DWuea@~TrdguP#Nu6j>PqA8mRBGC7CjCS&Rr??#gb`(#SW>|M%m4%s1^?Or2mt{A20sGM59|NT00a;P|Jnc"
        "u0RaF3KOszG=Aw-XRlGy8kFS*TkBe_6Q%q&^H*CU@xIV_b;_O5b;IoTF-_Y~+0kJ~hb=&zSH^?57Q2*Kh2mt{A000nItSHvN|I7dc5C#9*00"
        ";pA00BP`yb}216tAP&rsWZ_g0osO^%L|z)tU}|Ps&m1li}C$cP>B5qc@{uKAnqzwvJ7FtE|{!x#*Xaha8+O%7j#2Ju|a<QG(OM_dxB}mtm&m"
        "B_92yoHU9=-}%f_5Dtmlf|DFhcI|NQ1lE{nW%wTUtF!qIHS&UvUYrtE8=02!fU<5b|Je"
    ),
}

ARITHMETIC_JPEGS = {name: b85decode(packed) for name, packed in _PACKED.items()}
"""By subsampling, with restart markers, in scans."""
